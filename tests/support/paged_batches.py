"""Builds random paged batches for the attention tests, and attends over them the slow and obvious way, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labcore.attention.backend import AttentionMetadata
from labcore.kvcache.tensors import KVCache
from labcore.models.layers import LayerShape


@dataclass
class PagedBatch:
    """A cache whose history is in place, the step's own q, k and v, and the dense K and V of every sequence."""

    cache: KVCache
    metadata: AttentionMetadata
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]]


def paged_batch(
    seqs: list[tuple[int, int]],
    *,
    num_query_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    garbage: float = float("nan"),
    poison: int = 0,
    order: str = "random",
    spare: int = 3,
    seed: int = 0,
) -> PagedBatch:
    """Sequences of (history, query) lengths in a pool of blocks; every slot that nobody owns holds `garbage`.

    poison: block id that fills each table's tail beyond the sequence's length.
    order:  how blocks are handed out: "random", "identity" (0, 1, 2, …) or "reversed".
    """
    gen = torch.Generator().manual_seed(seed)
    lens = [history + query for history, query in seqs]
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + spare
    free = torch.randperm(num_blocks, generator=gen).tolist()  # handed out from the end
    if order != "random":
        free.sort(reverse=order == "identity")
    tables = [[free.pop() for _ in range(n)] for n in counts]
    cache = KVCache([LayerShape(num_query_heads, num_kv_heads, head_dim)], num_blocks, block_size, dtype)
    cache.fill(garbage)
    dense, slots = [], []
    for (history, query), table in zip(seqs, tables, strict=True):
        kv = torch.randn(2, history + query, num_kv_heads, head_dim, generator=gen).to(dtype)
        dense.append((kv[0], kv[1]))
        where = [table[i // block_size] * block_size + i % block_size for i in range(history + query)]
        cache.k[0].flatten(0, 1)[where[:history]] = kv[0, :history]
        cache.v[0].flatten(0, 1)[where[:history]] = kv[1, :history]
        slots += where[history:]
    queries = [query for _, query in seqs]
    ends = torch.tensor([0, *queries]).cumsum(0)
    widest = max(counts)
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_tables=torch.tensor([t + [poison] * (widest - len(t)) for t in tables], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        cu_seqlens=ends.to(torch.int32),
        block_size=block_size,
        seq_lens_list=lens,
        query_lens_list=queries,
    )
    own = [(k[history:], v[history:]) for (k, v), (history, _) in zip(dense, seqs, strict=True)]
    return PagedBatch(
        cache=cache,
        metadata=metadata,
        q=torch.randn(sum(queries), num_query_heads, head_dim, generator=gen).to(dtype),
        k=torch.cat([k for k, _ in own]),
        v=torch.cat([v for _, v in own]),
        dense=dense,
    )


def reference(
    batch: PagedBatch,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention one query and one head at a time, in float64: [T, Hq, D]."""
    out = torch.empty(batch.q.shape, dtype=torch.float64)
    row = 0
    for (k, v), num_queries in zip(batch.dense, batch.metadata.query_lens_list, strict=True):
        group = batch.q.shape[1] // k.shape[1]
        for i in range(num_queries):
            position = k.shape[0] - num_queries + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(batch.q.shape[1]):
                keys, values = (t[first : position + 1, head // group].double() for t in (k, v))
                scores = keys @ batch.q[row, head].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                out[row, head] = scores.softmax(0)[: len(values)] @ values
            row += 1
    return out
