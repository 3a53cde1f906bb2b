"""A sample batch for kernels: random K and V in shuffled blocks, NaN in every unowned slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.attention.backend import AttentionMetadata
from labcore.kvcache.tensors import KVCache
from labcore.models.layers import LayerShape


@dataclass(frozen=True)
class Heads:
    """Number of query heads and KV heads, and the head size."""

    query: int = 32
    kv: int = 8
    dim: int = 128


@dataclass
class PagedProblem:
    """One layer's cache, a step's metadata and its queries, [T, Hq, D]."""

    cache: KVCache
    metadata: AttentionMetadata
    q: Tensor

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the step reads, each counted once."""
        _, _, num_heads, head_dim = self.cache.k[0].shape
        return 2 * sum(self.metadata.seq_lens_list) * num_heads * head_dim * self.q.element_size()


def paged_problem(
    seqs: Sequence[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int = 16,
    seed: int = 0,
) -> PagedProblem:
    """A step over sequences of (total tokens, query tokens). The queries' own K and V are already in the cache."""
    gen = torch.Generator(device=device).manual_seed(seed)
    lens, queries = [length for length, _ in seqs], [query for _, query in seqs]
    counts = [-(-length // block_size) for length in lens]
    cache = KVCache([LayerShape(heads.query, heads.kv, heads.dim)], sum(counts) + 1, block_size, dtype, device)
    cache.fill(float("nan"))
    order = torch.randperm(sum(counts), generator=gen, device=device).to(torch.int32)
    tables = torch.zeros(len(seqs), max(counts), dtype=torch.int32, device=device)
    for table, blocks in zip(tables, order.split(counts), strict=True):
        table[: len(blocks)] = blocks
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    positions = torch.arange(tables.shape[1] * block_size, device=device)
    slots = tables.long().repeat_interleave(block_size, 1) * block_size + positions % block_size
    owned = slots[positions < seq_lens[:, None]]
    for pool in (cache.k[0], cache.v[0]):
        values = torch.randn(len(owned), heads.kv, heads.dim, generator=gen, device=device, dtype=torch.float32)
        pool.flatten(0, 1)[owned] = values.to(dtype)
    ends = torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32)
    new = torch.cat([row[length - query : length] for row, (length, query) in zip(slots, seqs, strict=True)])
    metadata = AttentionMetadata(new, tables, seq_lens, ends, block_size, lens, queries)
    q = torch.randn(sum(queries), heads.query, heads.dim, generator=gen, device=device, dtype=torch.float32)
    return PagedProblem(cache, metadata, q.to(dtype))


def gathered(problem: PagedProblem) -> tuple[Tensor, Tensor]:
    """K and V of sequences of one length gathered to contiguous tensors, [S, Hkv, L, D], for dense attention."""
    (length,) = set(problem.metadata.seq_lens_list)
    blocks = problem.metadata.block_tables.long()
    dense = [pool[blocks].flatten(1, 2)[:, :length] for pool in (problem.cache.k[0], problem.cache.v[0])]
    return dense[0].transpose(1, 2).contiguous(), dense[1].transpose(1, 2).contiguous()
