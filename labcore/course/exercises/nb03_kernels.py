"""What notebook 03's checks run a learner's kernels in, and what they should come to.

Needs Triton; `nb03` imports it when something is checked, so that the course goes on where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labcore.attention.kernels.tile_sizes import Tile
from labcore.attention.kernels.triton_mode import INTERPRETED, tl, triton
from labcore.attention.sample_batch import Heads, PagedProblem, paged_problem
from labcore.attention.triton_backend import TritonAttention

DEVICE = "cpu" if INTERPRETED else "cuda"


@triton.jit
def each_tile(
    scores, weights, rescales, peaks, totals, num_tiles,
    STEP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Hand tile after tile of scores, [tiles, ROWS, TILE], to STEP, and write down what it answers each time."""
    rows, keys = tl.arange(0, ROWS), tl.arange(0, TILE)
    m_i, l_i = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for i in range(0, num_tiles):
        where = (i * ROWS + rows)[:, None] * TILE + keys[None, :]
        weight, rescale, m_i, l_i = STEP(tl.load(scores + where), m_i, l_i)
        tl.store(weights + where, weight)
        tl.store(rescales + i * ROWS + rows, rescale)
        tl.store(peaks + i * ROWS + rows, m_i)
        tl.store(totals + i * ROWS + rows, l_i)


def fold(step: object, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a softmax step makes of tiles of scores, [tiles, ROWS, TILE].

    Weights of each tile, [tiles, ROWS, TILE]; rescale, peak and total after each, [tiles, ROWS].
    """
    scores = scores.to(DEVICE, torch.float32)
    num_tiles, num_rows, tile = scores.shape
    weights = torch.full_like(scores, float("nan"))
    rescales, peaks, totals = torch.full((3, num_tiles, num_rows), float("nan"), device=DEVICE)
    each_tile[(1,)](scores, weights, rescales, peaks, totals, num_tiles, STEP=step, ROWS=num_rows, TILE=tile)
    return weights.cpu(), rescales.cpu(), peaks.cpu(), totals.cpu()


@triton.jit
def write_rows(heads, valid, kv_head, ROWS_OF: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Write down which heads ROWS_OF puts into the rows of a tile, and which of them count."""
    head, real = ROWS_OF(kv_head, GROUP, ROWS)
    tl.store(heads + tl.arange(0, ROWS), head)
    tl.store(valid + tl.arange(0, ROWS), real.to(tl.int32))


def rows_of(function: object, kv_head: int, group: int, rows: int) -> tuple[list[int], list[int]]:
    """The heads of a tile's rows, and 1 for each row that is one."""
    heads, valid = torch.full((2, rows), -1, dtype=torch.int32, device=DEVICE)
    write_rows[(1,)](heads, valid, kv_head, ROWS_OF=function, GROUP=group, ROWS=rows)
    return heads.tolist(), valid.tolist()


def used_pool(lens: Sequence[int], num_query_heads: int = 4, block_size: int = 16) -> PagedProblem:
    """A decode step in a pool that has been used: NaN in all slots that nobody owns, nonsense beyond the block tables.

    Block 0 belongs to nobody. One KV head of size 16.
    """
    heads = Heads(num_query_heads, 1, 16)
    problem = paged_problem([(n, 1) for n in lens], heads, torch.float32, DEVICE, block_size)
    for pool in (problem.cache.k[0], problem.cache.v[0]):
        pool.copy_(pool.roll(1, 0))
    for table, n in zip(problem.metadata.block_tables, lens, strict=True):
        table += 1
        table[-(-n // block_size) :] = 2**31 - 1
    return problem


def expected_decode(problem: PagedProblem, scaling: float) -> Tensor:
    """Attention of a decode step in float64, one sequence after the other, [S, Hq, D]."""
    metadata, pools = problem.metadata, (problem.cache.k[0], problem.cache.v[0])
    out = []
    for q, table, n in zip(problem.q, metadata.block_tables, metadata.seq_lens_list, strict=True):
        positions = torch.arange(n, device=DEVICE)
        blocks, slots = table[positions // metadata.block_size].long(), positions % metadata.block_size
        k, v = (pool[blocks, slots].double().repeat_interleave(q.shape[0] // pool.shape[2], 1) for pool in pools)
        weights = (torch.einsum("hd,nhd->hn", q.double(), k) * scaling).softmax(1)
        out.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(out).cpu()


def decoded(kernel: object, problem: PagedProblem, scaling: float, splits: int = 1) -> Tensor:
    """What a `paged_decode` of one's own makes of a step, in tiles of 16 keys."""
    backend = TritonAttention(Tile(16, 16, 4, 2), splits, {"paged_decode": kernel})
    return backend.attend(problem.cache, 0, problem.q, problem.metadata, scaling=scaling).cpu()


def joined(kernel: object, partial: Tensor, log_totals: Tensor) -> Tensor:
    """What a `reduce_splits` makes of partial results, [S, Hq, splits, D], and their log2 totals, [S, Hq, splits]."""
    num_seqs, num_heads, splits, head_dim = partial.shape
    partial, log_totals = partial.to(DEVICE), log_totals.to(DEVICE).contiguous()
    out = torch.full((num_seqs, num_heads, head_dim), float("nan"), device=DEVICE)
    strides = dict(out_strides=out.stride(), partial_strides=partial.stride())
    sizes = dict(HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), SPLITS=splits)
    kernel[(num_seqs, num_heads)](out, partial, log_totals, **strides, **sizes)
    return out.cpu()


def one_query(kernel: object, problem: PagedProblem) -> Tensor:
    """The bug hunt's kernel on each sequence of a step with one query head: [S, D]."""
    (pool, values), metadata = (problem.cache.k[0], problem.cache.v[0]), problem.metadata
    out = torch.full_like(problem.q[:, 0], float("nan"))
    for i, n in enumerate(metadata.seq_lens_list):
        sizes = dict(BLOCK_SIZE=metadata.block_size, DIMS=pool.shape[3], TILE=16)
        kernel[(1,)](out[i], problem.q[i, 0], pool, values, metadata.block_tables[i], n, pool.stride(0), **sizes)
    return out.cpu()
