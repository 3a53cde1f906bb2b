"""Which decoders are served, which are refused, and that the reason is the true one."""

from __future__ import annotations

import subprocess
import sys
from copy import copy

import pytest
import torch
from tiny_models import CONFIGS, KINDS, NO_SPECIAL_TOKENS, WINDOW, WINDOWED, randomised, tiny
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DeepseekV2Config,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    JambaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralAttention

from labcore.models import UnsupportedModel, from_model
from labcore.models.layers import LayerShape
from labcore.models.loader import max_positions
from labcore.models.probe import probe
from labcore.models.support import check_supported

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


def refusal(model_or_config: object) -> str:
    """The message with which a model, or its config, is refused."""
    with pytest.raises(UnsupportedModel) as error:
        check_supported(model_or_config)
        probe(model_or_config)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_each_family_is_served_and_gives_one_shape_a_layer(kind: str) -> None:
    model = tiny(kind)
    before = model.config._attn_implementation
    loaded = from_model(model)
    assert [layer.num_query_heads % layer.num_kv_heads for layer in loaded.layers] == [0] * len(loaded.layers)
    assert len(loaded.layers) == model.config.num_hidden_layers
    assert loaded.max_positions == 128
    assert loaded.vocab_size == 256
    assert {layer.sliding_window for layer in loaded.layers} <= {None, WINDOW}
    assert (WINDOW in {layer.sliding_window for layer in loaded.layers}) == (kind in WINDOWED)
    assert model.config._attn_implementation == before


def test_the_shapes_are_those_of_each_layer_in_order() -> None:
    sliding = LayerShape(num_query_heads=4, num_kv_heads=1, head_dim=16, sliding_window=WINDOW)
    full = LayerShape(num_query_heads=4, num_kv_heads=1, head_dim=16, sliding_window=None)
    assert probe(tiny("gemma3_text")) == [sliding, full, sliding, full]


def test_a_probe_leaves_the_model_and_its_answers_as_they_were() -> None:
    model = tiny("gemma2")
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        probe(model)
        after = model(ids).logits
    assert torch.equal(before, after)
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder–decoder"),
        (AutoConfig.for_model("bart"), "encoder–decoder"),
        (AutoConfig.for_model("vit"), "not a causal decoder"),
        (AutoConfig.for_model("bloom"), "ALiBi"),
        (AutoConfig.for_model("mpt"), "ALiBi"),
        (AutoConfig.for_model("falcon", alibi=True), "ALiBi"),
        (AutoConfig.for_model("falcon"), "takes no attention function but its own"),
        (AutoConfig.for_model("mamba"), "state-space"),
        (AutoConfig.for_model("rwkv"), "recurrent"),
        (JambaConfig(), "state-space"),
        (AutoConfig.for_model("bamba"), "state-space"),
        (AutoConfig.for_model("falcon_h1"), "state-space"),
        (AutoConfig.for_model("qwen3_next"), "recurrent"),
        (AutoConfig.for_model("recurrent_gemma"), "recurrent"),
        (AutoConfig.for_model("llama4_text"), "chunked attention"),
        (Gemma3nTextConfig(), "shares the keys and values of earlier layers"),
        (DeepseekV2Config(), "multi-head latent attention"),
        (AutoConfig.for_model("deepseek_v3"), "multi-head latent attention"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_config_that_rules_a_model_out_is_refused_by_name_and_with_the_reason(config, reason: str) -> None:
    message = refusal(config)
    assert reason in message
    assert repr(config.model_type) in message
    assert "choose a plain decoder" in message


def test_an_encoder_is_refused_because_its_tokens_see_later_ones() -> None:
    assert "see later ones" in refusal(randomised(BertLMHeadModel(BertConfig(**SMALL))))


def test_a_decoder_made_bidirectional_is_refused() -> None:
    config = Gemma3TextConfig(**SMALL, num_key_value_heads=1, head_dim=16, use_bidirectional_attention=True)
    assert "see later ones" in refusal(randomised(AutoModelForCausalLM.from_config(config)))


def test_a_model_that_attends_twice_in_a_layer_is_refused() -> None:
    model = randomised(DiffLlamaForCausalLM(DiffLlamaConfig(**SMALL, num_key_value_heads=2)))
    assert "once in each of its 2 layers" in refusal(model)


def test_a_model_without_a_language_head_is_refused() -> None:
    assert "fails on a flattened batch" in refusal(randomised(LlamaModel(tiny("llama").config)))


class Leaky(LlamaMLP):
    """Lets each token see a trace of the one before it, as a convolution or a token shift would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.01 * torch.roll(x, 1, dims=1))


class Wrapped(LlamaAttention):
    """Llama's attention with something changed in the call of the attention function."""

    sees = {}

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs | self.sees)


def llama_with(**parts: type) -> LlamaForCausalLM:
    """A tiny Llama whose layers have some of their modules put to a class of ours."""
    model = tiny("llama")
    for layer in model.model.layers:
        for name, part in parts.items():
            getattr(layer, name).__class__ = part
    return model


def test_a_model_that_mixes_tokens_outside_its_attention_is_refused() -> None:
    assert "mixes tokens outside its attention" in refusal(llama_with(mlp=Leaky))


def test_a_call_with_a_position_bias_is_refused() -> None:
    class Biased(Wrapped):
        sees = {"position_bias": torch.ones(1)}

    assert "position bias" in refusal(llama_with(self_attn=Biased))


def test_a_call_with_an_argument_that_nobody_knows_is_refused_by_that_argument() -> None:
    class Novel(Wrapped):
        sees = {"attention_temperature": 0.5}

    assert "'attention_temperature'" in refusal(llama_with(self_attn=Novel))


def test_an_argument_that_is_none_changes_nothing() -> None:
    class Unset(Wrapped):
        sees = {"position_bias": None}

    assert len(probe(llama_with(self_attn=Unset))) == 3


def test_a_window_in_the_call_that_is_not_in_the_mask_is_refused() -> None:
    class Windowed(Wrapped):
        sees = {"sliding_window": 5}

    assert "a sliding window of 5" in refusal(llama_with(self_attn=Windowed))


def test_a_window_that_is_off_by_one_is_refused() -> None:
    class Windowed(MistralAttention):
        def forward(self, *args, **kwargs):
            shared, self.config = self.config, copy(self.config)
            self.config.sliding_window += 1
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.config = shared

    model = tiny("mistral", sliding_window=40)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Windowed
    assert "hides other tokens in its mask than a sliding window of 41" in refusal(model)


def test_a_mask_with_numbers_in_it_is_refused_as_alibi_would_be() -> None:
    class Numbers(Wrapped):
        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            if attention_mask is not None:
                attention_mask = attention_mask.float()
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)

    assert "more than visibility" in refusal(llama_with(self_attn=Numbers))


def test_a_model_that_ignores_position_ids_is_refused() -> None:
    model = tiny("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    assert "ignores position_ids" in refusal(model)


def test_a_model_that_keeps_arguments_from_its_attention_is_refused() -> None:
    class Deaf(LlamaAttention):
        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            return super().forward(hidden_states, position_embeddings, attention_mask)

    assert "hand keyword arguments through" in refusal(llama_with(self_attn=Deaf))


def test_layers_that_share_their_keys_are_refused() -> None:
    first_layer_keys: list[torch.Tensor] = []

    class Sharing(LlamaAttention):
        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            attend = AttentionInterface().get_interface(self.config._attn_implementation, None)
            if self.layer_idx == 0:
                first_layer_keys[:] = [self.k_proj(hidden_states).view(1, -1, 2, 8).transpose(1, 2)]
            query = self.q_proj(hidden_states).view(1, -1, 8, 8).transpose(1, 2)
            out, _ = attend(self, query, first_layer_keys[0], first_layer_keys[0], attention_mask, **kwargs)
            return out.flatten(2), None

    assert "shares the keys of one layer" in refusal(llama_with(self_attn=Sharing))


def test_longrope_is_served_up_to_the_length_at_which_it_would_turn_keys_anew() -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    config = CONFIGS["phi3"](**NO_SPECIAL_TOKENS, rope_parameters=rope, original_max_position_embeddings=32)
    assert config.max_position_embeddings == 128
    assert max_positions(config) == 32


def test_naming_models_and_layer_shapes_imports_no_torch() -> None:
    code = (
        "import sys, labcore.models; labcore.models.LayerShape; labcore.models.fetch_default; labcore.models.resolve; "
    )
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=60)
