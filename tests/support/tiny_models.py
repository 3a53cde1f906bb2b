"""Tiny decoders with random weights, one a family, that say different things to different prompts.

Weights are large and every one is random, biases, norms and sinks too, so that each part of a family's arithmetic shows
in its greedy tokens, and no two tokens are close to a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

WINDOW = 8
VOCAB = 256
SCALE = 0.2

SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 128}
MLP = {"intermediate_size": 96}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
SLIDING_THEN_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}


def heads(queries: int, kv: int, head_dim: int | None = None) -> dict[str, int]:
    """Query and KV heads; the head size only where the family lets one choose it."""
    counts = {"num_attention_heads": queries, "num_key_value_heads": kv}
    return counts if head_dim is None else counts | {"head_dim": head_dim}


CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **kw: LlamaConfig(**SIZES, **MLP, **heads(8, 2), num_hidden_layers=3, attention_bias=True, **kw),
    "qwen2": lambda **kw: Qwen2Config(**SIZES, **MLP, **heads(4, 2), num_hidden_layers=3, **kw),
    "qwen3": lambda **kw: Qwen3Config(**SIZES, **MLP, **heads(4, 1, 32), num_hidden_layers=2, **kw),
    "mistral": lambda **kw: MistralConfig(
        **SIZES, **MLP, **heads(6, 2, 16), num_hidden_layers=3, **{"sliding_window": WINDOW} | kw
    ),
    "gemma2": lambda **kw: Gemma2Config(
        **SIZES,
        **MLP,
        **heads(4, 2, 16),
        **SLIDING_THEN_FULL,
        num_hidden_layers=4,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
        **kw,
    ),
    "gemma3_text": lambda **kw: Gemma3TextConfig(
        **SIZES, **MLP, **heads(4, 1, 16), **SLIDING_THEN_FULL, num_hidden_layers=4, query_pre_attn_scalar=24, **kw
    ),
    "phi3": lambda **kw: Phi3Config(**SIZES, **MLP, **heads(4, 4), num_hidden_layers=3, sliding_window=WINDOW, **kw),
    "gpt2": lambda **kw: GPT2Config(vocab_size=VOCAB, n_embd=64, n_head=4, n_layer=3, n_positions=128, **kw),
    "gpt_neox": lambda **kw: GPTNeoXConfig(**SIZES, **MLP, num_attention_heads=4, num_hidden_layers=3, **kw),
    "olmo2": lambda **kw: Olmo2Config(**SIZES, **MLP, **heads(4, 2), num_hidden_layers=3, **kw),
    "gpt_oss": lambda **kw: GptOssConfig(
        **SIZES,
        **MLP,
        **heads(8, 2, 16),
        **SLIDING_THEN_FULL,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **kw,
    ),
    "smollm3": lambda **kw: SmolLM3Config(
        **SIZES, **MLP, **heads(4, 2), num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], use_sliding_window=False, **kw
    ),
    "cohere": lambda **kw: CohereConfig(**SIZES, **MLP, **heads(4, 2), num_hidden_layers=3, use_qk_norm=True, **kw),
    "opt": lambda **kw: OPTConfig(
        **SIZES, ffn_dim=96, word_embed_proj_dim=64, num_attention_heads=4, num_hidden_layers=3, **kw
    ),
}
"""Every family of the tests. Query heads per KV head: 1 (phi3, gpt2, gpt_neox, opt), 2, 3 (mistral) and 4."""

KINDS = tuple(CONFIGS)
WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss")


def tiny(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A decoder of family `kind` in eval mode, float32, its config changed by `changes`.

    The same arguments give the same weights.
    """
    config = CONFIGS[kind](**NO_SPECIAL_TOKENS | changes)
    return randomised(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config), seed)


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model in eval mode, every parameter drawn anew: N(0, SCALE), the weights of norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * SCALE + is_norm)
    return model.eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random token ids."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_greedy(model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The tokens that transformers' own `generate` adds, greedily. Tiny models have no token that ends a text.

    Attention is transformers' eager one: not all of its versions honour a softcap in the faster ones.
    """
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        model.set_attn_implementation(before)
    return out[0, len(prompt_ids) :].tolist()
