"""Unsupported architectures, rejected by config before any weights are read.

A paged KV cache holds one K and one V per layer and token, and attention is causal, over all earlier tokens or a sliding
window. Architectures with other state (SSMs, cross-attention) or other masks (ALiBi, chunked attention) are rejected.
What a config doesn't tell, `labcore.models.probe` finds by running the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from labcore.models.errors import UnsupportedModel

ALIBI = "adds a bias to attention scores by distance (ALiBi)"
STATE = "keeps a recurrent or state-space memory, which has no blocks to page"

FAMILIES = {
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"), STATE),
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h"), STATE),
}
"""Model types rejected by name, with the reason."""

PAGEABLE_LAYERS = ("full_attention", "sliding_attention")
LAYER_KINDS = {
    "chunked_attention": "attends within chunks, a meaning that its mask carries (chunked attention)",
    "linear_attention": STATE,
    "mamba": STATE,
    "conv": "has convolution layers, whose memory has no blocks to page",
}
"""Unsupported entries of `config.layer_types`, with the reason."""


def check_supported(config: Any) -> None:
    """Raise `UnsupportedModel`, with model type and reason, if the config rules the model out.

    config   a transformers config, or a model that has one
    """
    config = getattr(config, "config", config)
    for reason in refusals(config):
        raise UnsupportedModel.because(config.model_type, reason)


def refusals(config: Any) -> Iterator[str]:
    """Reasons to reject a config, as phrases that continue "it …"; empty for a supported one."""
    if config.is_encoder_decoder:
        yield "is an encoder–decoder: its decoder also attends to an encoder's output"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield "is not a causal decoder that transformers can run"
        return
    text_config = config.get_text_config(decoder=True)

    if config.model_type in FAMILIES:
        yield FAMILIES[config.model_type]
    if getattr(text_config, "alibi", False):
        yield ALIBI

    for kind in getattr(text_config, "layer_types", None) or ():
        if kind not in PAGEABLE_LAYERS:
            yield LAYER_KINDS.get(kind, f"has layers of the kind {kind!r}, and a paged cache serves {PAGEABLE_LAYERS}")
    if getattr(text_config, "num_kv_shared_layers", 0):
        yield f"shares the keys and values of earlier layers with its last {text_config.num_kv_shared_layers} layers"

    key_dim = getattr(text_config, "qk_nope_head_dim", 0) + getattr(text_config, "qk_rope_head_dim", 0)
    value_dim = getattr(text_config, "v_head_dim", key_dim)
    if key_dim and value_dim and key_dim != value_dim:
        yield f"has keys of size {key_dim} and values of size {value_dim} (multi-head latent attention)"

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class.is_backend_compatible():
        yield f"takes no attention function but its own: {model_class.__name__} is off transformers' AttentionInterface"
