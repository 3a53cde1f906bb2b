"""What can't be served from a paged KV cache, and why: told from the config, before any weights are read.

A paged cache keeps, for each layer and token, one K and one V, and attention sees all earlier tokens of the sequence or
those in a sliding window. Models that remember in another way, or whose masks mean more than that, would speak nonsense
here, so they are refused by name. What a config can't tell, `labcore.models.probe` finds out by running the model.
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
"""Families whose config gives the reason away in its name alone."""

PAGEABLE_LAYERS = ("full_attention", "sliding_attention")
LAYER_KINDS = {
    "chunked_attention": "attends within chunks, a meaning that its mask carries (chunked attention)",
    "linear_attention": STATE,
    "mamba": STATE,
    "conv": "has convolution layers, whose memory has no blocks to page",
}
"""Why a kind of layer can't be served, by its name in `config.layer_types`."""


def check_supported(config: Any) -> None:
    """Raise `UnsupportedModel`, naming the model type and the reason, if the config alone rules the model out.

    `config` is a transformers config, or a model that has one.
    """
    config = getattr(config, "config", config)
    for reason in refusals(config):
        raise UnsupportedModel.because(config.model_type, reason)


def refusals(config: Any) -> Iterator[str]:
    """The reasons against a config, as phrases that go on from "it ..."; nothing for one that may be served."""
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
