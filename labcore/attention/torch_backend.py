"""Paged attention in plain torch: the oracle that the Triton kernels are held to, and the backend on a CPU.

The pages of a sequence are gathered into one dense tensor, and `scaled_dot_product_attention` does the rest. Decoding
sequences of similar length share one call; each longer piece of a prompt has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labcore.attention.backend import AttentionBackend, AttentionMetadata
from labcore.kvcache.tensors import KVCache

SHORTEST_TO_LONGEST = 0.6
"""Sequences this close in length share a padded call: a wider spread gathers too much padding, a narrower one makes too
many small calls."""


@dataclass
class Group:
    """Sequences of one attention call: B of them, Q queries and L visible tokens each; Q is 1 unless B is.

    rows    [B * Q] int64   their queries in the flattened batch
    slots   [B * L] int64   slots to gather; padding repeats the sequence's first slot, so that no foreign row is read
    mask    [B, 1, Q, L]    added to the scores: 0, or -inf where a query may not look; None if `causal` says it all
    causal  the queries see each other causally, and there is no history before them
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None
    causal: bool
    num_seqs: int


class TorchAttention(AttentionBackend):
    """Gather the pages, then attend. What all layers share is worked out once a step and kept until the next one."""

    def __init__(self) -> None:
        self._meta: AttentionMetadata | None = None
        self._kept: Tensor | None = None
        self._groups: dict[tuple[int | None, torch.dtype], list[Group]] = {}

    def store(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, meta: AttentionMetadata) -> None:
        self._begin(meta)
        slots, kept = meta.slot_mapping, self._kept
        if kept is not None:
            slots, k, v = slots[kept], k[kept], v[kept]
        cache.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        cache.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        meta: AttentionMetadata,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._begin(meta)
        keys, values = cache.k[layer].flatten(0, 1), cache.v[layer].flatten(0, 1)
        num_kv_heads, dim = keys.shape[1:]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._step_groups(meta, sliding_window, q.dtype):
            shape = (group.num_seqs, -1, num_kv_heads, dim)
            k = keys.index_select(0, group.slots).view(shape).transpose(1, 2)
            v = values.index_select(0, group.slots).view(shape).transpose(1, 2)
            rows = q.index_select(0, group.rows).view(group.num_seqs, -1, *q.shape[1:]).transpose(1, 2)
            if softcap is None and sinks is None:
                attended = fused_attention(rows, k, v, group, scaling)
            else:
                attended = plain_attention(rows, k, v, group, scaling, softcap, sinks)
            out.index_copy_(0, group.rows, attended.transpose(1, 2).flatten(0, 1))
        return out

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        src, dst = torch.tensor(pairs, device=cache.k[0].device).unbind(1)
        for tensor in cache.k + cache.v:
            tensor.index_copy_(0, dst, tensor.index_select(0, src))

    def _begin(self, meta: AttentionMetadata) -> None:
        if meta is not self._meta:
            kept = meta.slot_mapping >= 0
            self._meta, self._groups, self._kept = meta, {}, None if bool(kept.all()) else kept

    def _step_groups(self, meta: AttentionMetadata, window: int | None, dtype: torch.dtype) -> list[Group]:
        if (window, dtype) not in self._groups:
            self._groups[window, dtype] = make_groups(meta, window, dtype)
        return self._groups[window, dtype]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, scaling: float) -> Tensor:
    """q [B, Hq, Q, D] over k and v [B, Hkv, L, D] → [B, Hq, Q, D], without ever holding all the scores.

    A single query's heads that share a KV head become the rows of one product (GQA packing): K and V are read once for
    all of them, and not repeated in memory.
    """
    if q.shape[2] > 1:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, is_causal=group.causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    packed = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    return scaled_dot_product_attention(packed, k, v, attn_mask=group.mask, scale=scaling).view(q.shape)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The same in the open, for scores that are squashed (`softcap`) or share their softmax with `sinks`."""
    heads_per_kv = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(heads_per_kv, dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if group.causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    elif group.mask is not None:
        scores = scores + group.mask
    if sinks is not None:
        sink_column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights.to(v.dtype) @ v).to(q.dtype)  # a float64 mask has made float64 of them


def make_groups(meta: AttentionMetadata, window: int | None, dtype: torch.dtype) -> list[Group]:
    """Sort the step's sequences into attention calls: see `Group` and `SHORTEST_TO_LONGEST`."""
    decoding = [i for i, n in enumerate(meta.query_lens_list) if n == 1]
    visible = {i: min(meta.seq_lens_list[i], window or meta.seq_lens_list[i]) for i in decoding}
    decoding.sort(key=visible.__getitem__, reverse=True)
    groups, start = [], 0
    for end in range(1, len(decoding) + 1):
        if end == len(decoding) or visible[decoding[end]] < SHORTEST_TO_LONGEST * visible[decoding[start]]:
            groups.append(decode_group(meta, decoding[start:end], window, dtype))
            start = end
    groups += [prefill_group(meta, i, window, dtype) for i, n in enumerate(meta.query_lens_list) if n > 1]
    return groups


def decode_group(meta: AttentionMetadata, seqs: list[int], window: int | None, dtype: torch.dtype) -> Group:
    """One query each for B sequences, padded to the longest of them."""
    device = meta.seq_lens.device
    index = torch.tensor(seqs, device=device)
    lens = meta.seq_lens[index].long()
    first = (lens - window).clamp_min(0) if window else torch.zeros_like(lens)
    longest = max(min(meta.seq_lens_list[i], window or meta.seq_lens_list[i]) for i in seqs)
    positions = first[:, None] + torch.arange(longest, device=device)
    seen = positions < lens[:, None]
    slots = table_slots(meta, index, torch.where(seen, positions, first[:, None]))
    mask = None if bool(seen.all()) else torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    return Group(
        rows=meta.cu_seqlens[index].long(),
        slots=slots.flatten(),
        mask=None if mask is None else mask[:, None, None, :],
        causal=False,
        num_seqs=len(seqs),
    )


def prefill_group(meta: AttentionMetadata, seq: int, window: int | None, dtype: torch.dtype) -> Group:
    """A run of queries of one sequence, which see its history and each other causally."""
    device = meta.seq_lens.device
    num_queries, visible = meta.query_lens_list[seq], meta.seq_lens_list[seq]
    history = visible - num_queries
    first = max(0, history - window + 1) if window else 0
    positions = torch.arange(first, visible, device=device)
    causal = history == 0 and (not window or window >= visible)
    start = sum(meta.query_lens_list[:seq])
    return Group(
        rows=torch.arange(start, start + num_queries, device=device),
        slots=table_slots(meta, torch.tensor([seq], device=device), positions[None]).flatten(),
        mask=None if causal else causal_mask(positions, positions[-num_queries:], window, dtype),
        causal=causal,
        num_seqs=1,
    )


def causal_mask(positions: Tensor, query_positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """[1, 1, Q, L]: 0 where a query may look, -inf after it and from `window` tokens before it on."""
    distance = query_positions[:, None] - positions
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[None, None]


def table_slots(meta: AttentionMetadata, seqs: Tensor, positions: Tensor) -> Tensor:
    """Slots of token positions [B, L] of sequences [B], looked up in the block tables."""
    blocks = meta.block_tables[seqs].long().gather(1, positions // meta.block_size)
    return blocks * meta.block_size + positions % meta.block_size
