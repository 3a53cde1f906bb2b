"""Paged attention in torch: the CPU backend, and the reference for the Triton kernels.

Blocks are gathered into dense K and V for `scaled_dot_product_attention`. Decoding sequences of similar length are
batched into one call; each prefill chunk is a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labcore.attention.backend import AttentionBackend, AttentionMetadata
from labcore.kvcache.tensors import KVCache

MIN_LENGTH_RATIO = 0.6
"""Shortest over longest sequence of a padded decode batch: lower gathers more padding, higher makes more calls."""


@dataclass
class AttentionBatch:
    """One attention call: B sequences, Q queries and L visible tokens each; B = 1 (prefill) or Q = 1 (decode).

    rows    [B * Q] int64   the queries' rows in the flattened batch
    slots   [B * L] int64   slots to gather; padding repeats the sequence's first slot
    mask    [B, 1, Q, L]    additive, 0 or -inf; None if nothing is masked beyond `causal`
    causal  causal mask over the queries, without earlier tokens
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None
    causal: bool
    num_seqs: int


class TorchAttention(AttentionBackend):
    """Gather blocks, then attend. Batches and masks are computed once per step and cached for all layers."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._kept: Tensor | None = None
        self._batches: dict[tuple[int | None, torch.dtype], list[AttentionBatch]] = {}

    def store(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        self._begin(metadata)
        slots, kept = metadata.slot_mapping, self._kept
        if kept is not None:
            slots, k, v = slots[kept], k[kept], v[kept]
        cache.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        cache.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        metadata: AttentionMetadata,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._begin(metadata)
        keys, values = cache.k[layer].flatten(0, 1), cache.v[layer].flatten(0, 1)
        num_kv_heads, dim = keys.shape[1:]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for batch in self._step_batches(metadata, sliding_window, q.dtype):
            shape = (batch.num_seqs, -1, num_kv_heads, dim)
            k = keys.index_select(0, batch.slots).view(shape).transpose(1, 2)
            v = values.index_select(0, batch.slots).view(shape).transpose(1, 2)
            rows = q.index_select(0, batch.rows).view(batch.num_seqs, -1, *q.shape[1:]).transpose(1, 2)
            if softcap is None and sinks is None:
                attended = fused_attention(rows, k, v, batch, scaling)
            else:
                attended = plain_attention(rows, k, v, batch, scaling, softcap, sinks)
            out.index_copy_(0, batch.rows, attended.transpose(1, 2).flatten(0, 1))
        return out

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        src, dst = torch.tensor(pairs, device=cache.k[0].device).unbind(1)
        for tensor in cache.k + cache.v:
            tensor.index_copy_(0, dst, tensor.index_select(0, src))

    def _begin(self, metadata: AttentionMetadata) -> None:
        if metadata is not self._metadata:
            kept = metadata.slot_mapping >= 0
            self._metadata, self._batches, self._kept = metadata, {}, None if bool(kept.all()) else kept

    def _step_batches(self, metadata: AttentionMetadata, window: int | None, dtype: torch.dtype) -> list[AttentionBatch]:
        if (window, dtype) not in self._batches:
            self._batches[window, dtype] = make_batches(metadata, window, dtype)
        return self._batches[window, dtype]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, scaling: float) -> Tensor:
    """q [B, Hq, Q, D] over k and v [B, Hkv, L, D] → [B, Hq, Q, D], without materialising the scores.

    GQA packing for single queries: the query heads of a KV head are rows of one product, so K and V are read once and
    not repeated in memory.
    """
    if q.shape[2] > 1:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=batch.mask, is_causal=batch.causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    packed = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    return scaled_dot_product_attention(packed, k, v, attn_mask=batch.mask, scale=scaling).view(q.shape)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The same with explicit scores, for `softcap` and `sinks`, which the fused call doesn't support."""
    heads_per_kv = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(heads_per_kv, dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if batch.causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    elif batch.mask is not None:
        scores = scores + batch.mask
    if sinks is not None:
        sink_column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights.to(v.dtype) @ v).to(q.dtype)  # a float64 mask promotes the weights


def make_batches(metadata: AttentionMetadata, window: int | None, dtype: torch.dtype) -> list[AttentionBatch]:
    """Group the step's sequences into attention calls: see `AttentionBatch` and `MIN_LENGTH_RATIO`."""
    decoding = [i for i, n in enumerate(metadata.query_lens_list) if n == 1]
    visible = {i: min(metadata.seq_lens_list[i], window or metadata.seq_lens_list[i]) for i in decoding}
    decoding.sort(key=visible.__getitem__, reverse=True)
    batches, start = [], 0
    for end in range(1, len(decoding) + 1):
        if end == len(decoding) or visible[decoding[end]] < MIN_LENGTH_RATIO * visible[decoding[start]]:
            batches.append(decode_batch(metadata, decoding[start:end], window, dtype))
            start = end
    batches += [prefill_batch(metadata, i, window, dtype) for i, n in enumerate(metadata.query_lens_list) if n > 1]
    return batches


def decode_batch(metadata: AttentionMetadata, seqs: list[int], window: int | None, dtype: torch.dtype) -> AttentionBatch:
    """B decoding sequences, one query each, padded to the longest."""
    device = metadata.seq_lens.device
    index = torch.tensor(seqs, device=device)
    lens = metadata.seq_lens[index].long()
    first = (lens - window).clamp_min(0) if window else torch.zeros_like(lens)
    longest = max(min(metadata.seq_lens_list[i], window or metadata.seq_lens_list[i]) for i in seqs)
    positions = first[:, None] + torch.arange(longest, device=device)
    seen = positions < lens[:, None]
    slots = table_slots(metadata, index, torch.where(seen, positions, first[:, None]))
    mask = None if bool(seen.all()) else torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    return AttentionBatch(
        rows=metadata.cu_seqlens[index].long(),
        slots=slots.flatten(),
        mask=None if mask is None else mask[:, None, None, :],
        causal=False,
        num_seqs=len(seqs),
    )


def prefill_batch(metadata: AttentionMetadata, seq: int, window: int | None, dtype: torch.dtype) -> AttentionBatch:
    """A prefill chunk: the queries of one sequence, causal over its earlier tokens and each other."""
    device = metadata.seq_lens.device
    num_queries, visible = metadata.query_lens_list[seq], metadata.seq_lens_list[seq]
    history = visible - num_queries
    first = max(0, history - window + 1) if window else 0
    positions = torch.arange(first, visible, device=device)
    causal = history == 0 and (not window or window >= visible)
    start = sum(metadata.query_lens_list[:seq])
    return AttentionBatch(
        rows=torch.arange(start, start + num_queries, device=device),
        slots=table_slots(metadata, torch.tensor([seq], device=device), positions[None]).flatten(),
        mask=None if causal else causal_mask(positions, positions[-num_queries:], window, dtype),
        causal=causal,
        num_seqs=1,
    )


def causal_mask(positions: Tensor, query_positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, Q, L]: 0 for visible tokens, -inf for later ones and for those `window` or more before."""
    distance = query_positions[:, None] - positions
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[None, None]


def table_slots(metadata: AttentionMetadata, seqs: Tensor, positions: Tensor) -> Tensor:
    """Slots of token positions [B, L] of sequences [B], by their block tables."""
    blocks = metadata.block_tables[seqs].long().gather(1, positions // metadata.block_size)
    return blocks * metadata.block_size + positions % metadata.block_size
