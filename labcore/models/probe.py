"""Probe a model's attention: detect by running it whether a paged KV cache can serve it.

Three forward passes over three tokens, with an attention function that records its calls and returns zeros:

    engine   the engine's call: two sequences in one flattened batch, [a b] [a] at positions 0 1 0, without mask and
             cache → the shape of each layer; both a's must get equal keys, or position_ids are ignored
    leak     the same with c b a. Attention returns zeros, so the logits of b and the second a must not change; if they
             do, another layer mixes tokens (state-space, convolution, token shift), with state outside the KV cache
    masks    one sequence a b c with the model's own masks, sampled at chosen positions up to a million → detects
             sliding windows, chunks and bidirectional spans of any width
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from labcore.models.errors import UnsupportedModel
from labcore.models.layers import LayerShape

PROBE = "labcore_probe"  # without a mask function, as in the engine: transformers then builds no mask at all
PROBE_MASKS = "labcore_probe_masks"
TOKENS = (5, 7, 11)  # a, b, c: not special tokens, which some models embed as zeros

HONOURED = {"scaling", "sliding_window", "softcap", "s_aux", "dropout"}
"""Arguments of an attention call that the engine implements (dropout is 0 in eval mode)."""

HARMLESS = {
    *("position_ids", "position_embeddings", "cache_position", "layer_idx", "is_causal"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", PROBE),
}
"""Arguments without effect: rotary embedding is already applied, and `is_causal` is checked separately."""

MEANINGS = {
    "position_bias": "adds a position bias to its attention scores",
    "indices": "attends to tokens that it selects for each query (sparse attention)",
    "block_indices": "attends to blocks that it selects for each query (sparse attention)",
}
"""Arguments that the engine doesn't implement, with their effect."""

registration = threading.Lock()  # transformers' registries belong to the whole process: one probe at a time


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function."""

    layer_idx: int | None
    num_query_heads: int
    key: Tensor  # [1, num_kv_heads, T, head_dim]; kept alive so that its address stays unique
    value_shape: torch.Size
    mask: Any
    is_causal: bool
    sliding_window: int | None
    kwargs: frozenset[str]  # names of the arguments that were not None


class AttentionProbe:
    """An attention function that records its calls and returns zeros, so no information passes between tokens."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions  # [P] int64, at which masks are sampled
        self.calls: list[AttentionCall] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The attention function: q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] → zeros [1, T, Hq, Dv]."""
        is_causal = kwargs.get("is_causal")
        self.calls.append(
            AttentionCall(
                layer_idx=getattr(module, "layer_idx", None),
                num_query_heads=query.shape[1],
                key=key,
                value_shape=value.shape,
                mask=attention_mask,
                is_causal=getattr(module, "is_causal", True) if is_causal is None else bool(is_causal),
                sliding_window=kwargs.get("sliding_window"),
                kwargs=frozenset(name for name, given in kwargs.items() if given is not None),
            )
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def sample_mask(self, *, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
        """The mask function: the mask at the sampled positions, bool [1, 1, P, P], instead of [1, 1, T, T]."""
        zero = self.positions.new_zeros(())
        visible = mask_function(zero, zero, self.positions[:, None], self.positions[None, :])
        return visible.expand(1, 1, len(self.positions), len(self.positions))

    def run(
        self, model: PreTrainedModel, tokens: list[int], positions: list[int] | None
    ) -> tuple[Tensor, list[AttentionCall]]:
        """One forward pass as in the engine: the logits of the last two tokens, and the recorded calls."""
        self.calls = []
        output = model(
            input_ids=torch.tensor([tokens], device=model.device),
            position_ids=None if positions is None else torch.tensor([positions], device=model.device),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=torch.tensor([1, 2], device=model.device),
            **{PROBE: True},
        )
        return output.logits, self.calls


def probe(model: PreTrainedModel) -> list[LayerShape]:
    """The shape of each attention layer of `model`, in forward order.

    `model` is in eval mode; its attention implementation is restored. Raises `UnsupportedModel` if the model needs
    something that the engine doesn't implement.
    """
    model_type = model.config.model_type
    recorder = AttentionProbe(sample_positions(model.config).to(model.device))
    a, b, c = TOKENS
    with attention_calls_go_to(recorder, model) as use, torch.no_grad():
        try:
            use(PROBE)
            logits, calls = recorder.run(model, [a, b, a], [0, 1, 0])
            other_logits, _ = recorder.run(model, [c, b, a], [0, 1, 0])
            use(PROBE_MASKS)
            _, masked_calls = recorder.run(model, [a, b, c], None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"fails on a flattened batch without mask and cache ({type(error).__name__}: {first_line(error)})"
            raise UnsupportedModel.because(model_type, reason) from error

    for reason in faults(model, recorder, calls, masked_calls, logits, other_logits):
        raise UnsupportedModel.because(model_type, reason)
    return [
        LayerShape(call.num_query_heads, call.key.shape[1], call.key.shape[3], call.sliding_window) for call in calls
    ]


def faults(
    model: PreTrainedModel,
    recorder: AttentionProbe,
    calls: list[AttentionCall],
    masked_calls: list[AttentionCall],
    logits: Tensor,
    other_logits: Tensor,
) -> Iterator[str]:
    """Reasons to reject the model after the three passes, as phrases that continue "it …"; empty if supported."""
    num_layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", len(calls))
    if [call.layer_idx for call in calls] != list(range(num_layers)) or len(masked_calls) != num_layers:
        yield f"does not call attention once in each of its {num_layers} layers, in order"
    if logits.shape[:2] != (1, 2):
        yield "computes logits for every token: its forward() has no logits_to_keep"
    if len({call.key.untyped_storage().data_ptr() for call in calls}) < len(calls):
        yield "shares the keys of one layer with another (shared KV layers)"
    if not close(logits, other_logits):
        yield "mixes tokens outside its attention (state-space, recurrent or convolution layers)"
    for call, masked in zip(calls, masked_calls, strict=True):
        yield from call_faults(call)
        yield from mask_faults(masked, recorder)
        if not close(call.key[:, :, 0], call.key[:, :, 2]):
            yield "ignores position_ids, so sequences can't share one flattened batch"
        if not close(call.key[:, :, :2], masked.key[:, :, :2]):
            yield "does not count positions from 0"


def call_faults(call: AttentionCall) -> Iterator[str]:
    """Unsupported features of one attention call."""
    key_shape, layer = call.key.shape, call.layer_idx
    if PROBE not in call.kwargs:
        yield "does not hand keyword arguments through to its attention"
    if not call.is_causal:
        yield f"lets tokens see later ones (attention is not causal in layer {layer})"
    if key_shape != call.value_shape:
        k, v = tuple(key_shape[1::2]), tuple(call.value_shape[1::2])
        yield f"has keys and values of different shapes: {k} and {v} (heads, head size) in layer {layer}"
    if call.num_query_heads % key_shape[1]:
        yield f"has {call.num_query_heads} query heads for {key_shape[1]} KV heads in layer {layer}"
    for name in sorted(call.kwargs - HONOURED - HARMLESS):
        yield MEANINGS.get(name, f"passes {name!r} to its attention, which the engine does not know")


def mask_faults(call: AttentionCall, recorder: AttentionProbe) -> Iterator[str]:
    """Differences between a call's mask and the engine's: causal, within the sliding window."""
    if call.mask is None:
        return  # causality is left to the attention function
    layer, positions = call.layer_idx, recorder.positions
    distance = positions[:, None] - positions[None, :]
    expected = ((distance >= 0) & (distance < (call.sliding_window or 2**62)))[None, None]
    if not torch.is_tensor(call.mask) or call.mask.dtype != torch.bool or call.mask.shape != expected.shape:
        yield f"puts more than visibility into its attention mask (layer {layer}; ALiBi, for example)"
    elif (call.mask & (distance < 0)).any():
        yield f"lets tokens see later ones (layer {layer})"
    elif not torch.equal(call.mask, expected):
        window = "no sliding window" if call.sliding_window is None else f"a sliding window of {call.sliding_window}"
        yield f"hides other tokens in its mask than {window} does (layer {layer}; chunked attention, for example)"


@contextmanager
def attention_calls_go_to(recorder: AttentionProbe, model: PreTrainedModel) -> Iterator[Callable[[str], None]]:
    """Register the probe under both names; yields a function that selects one; restores the model at the end."""
    before = model.config._attn_implementation
    with registration:
        AttentionInterface.register(PROBE, recorder.attend)
        AttentionInterface.register(PROBE_MASKS, recorder.attend)
        AttentionMaskInterface.register(PROBE_MASKS, recorder.sample_mask)
        try:
            yield model.set_attn_implementation
        finally:
            model.set_attn_implementation(before)


def sample_positions(config: Any) -> Tensor:
    """Positions at which every kind of mask shows, [P] int64: the first 64, and all powers of two and sizes in the
    config with their neighbours, up to the model's maximum position."""
    text_config = config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None) or 2**20
    sizes = [v for v in text_config.to_dict().values() if isinstance(v, int)] + [2**k for k in range(6, 21)]
    around = {size + step for size in sizes for step in (-1, 0, 1)} | set(range(64))
    return torch.tensor(sorted(p for p in around if 0 <= p < limit))


def close(x: Tensor, y: Tensor) -> bool:
    """Equal up to the rounding of `x`'s dtype, relative to its largest element."""
    tolerance = max(1e-5, 16 * torch.finfo(x.dtype).eps)
    scale = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]
