"""Paged attention as a transformers attention function, registered by name and called by every layer.

A model with `attn_implementation=ATTENTION_NAME` passes each layer's q, k and v, rotary embedding applied, to
`paged_attention`, with the `paged_step` that the runner passed to `model()`. Source: transformers' `AttentionInterface`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import AttentionInterface

from labcore.attention.backend import AttentionBackend, AttentionMetadata
from labcore.kvcache.tensors import KVCache

ATTENTION_NAME = "labcore_paged"


@dataclass
class PagedStep:
    """Backend, cache and metadata of a step: `model(…, paged_step=…)` passes it to every layer."""

    backend: AttentionBackend
    cache: KVCache
    metadata: AttentionMetadata


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] → ([1, T, Hq, D], None). attention_mask is unused."""
    backend, cache, metadata = paged_step.backend, paged_step.cache, paged_step.metadata
    layer = module.layer_idx
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    backend.store(cache, layer, k, v, metadata)
    out = backend.attend(
        cache,
        layer,
        q,
        metadata,
        scaling=q.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Register `ATTENTION_NAME` with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
