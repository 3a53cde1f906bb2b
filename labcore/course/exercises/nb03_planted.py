"""The planted defect of a bug hunt, and the same kernel without it. Needs Triton. Built in notebook 03."""

from __future__ import annotations

from labcore.attention.kernels.triton_mode import tl, triton


@triton.jit
def colleagues_decode(
    out, q, k_cache, v_cache, table, n, block_stride, BLOCK_SIZE: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr
):
    """One query and one KV head, with a defect that real kernels have had."""
    dims = tl.arange(0, DIMS)
    query, best, weight_sum, acc = tl.load(q + dims), float("-inf"), 0.0, tl.zeros([DIMS], tl.float32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        alive = at < n
        block = tl.load(table + at // BLOCK_SIZE, mask=alive, other=0).to(tl.int64)
        spot = (block * block_stride + at % BLOCK_SIZE * DIMS)[:, None] + dims[None, :]
        keys = tl.load(k_cache + spot, mask=alive[:, None], other=0.0)
        score = tl.where(alive, tl.sum(keys * query[None, :], axis=1), float("-inf"))
        top = tl.maximum(best, tl.max(score, axis=0))
        weight = tl.exp(score - top)
        values = tl.load(v_cache + spot)
        acc = acc * tl.exp(best - top) + tl.sum(weight[:, None] * values, axis=0)
        weight_sum, best = weight_sum * tl.exp(best - top) + tl.sum(weight, axis=0), top
    tl.store(out + dims, acc / weight_sum)


@triton.jit
def mended_decode(
    out, q, k_cache, v_cache, table, n, block_stride, BLOCK_SIZE: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr
):
    """`colleagues_decode` without its defect: a slot that doesn't count is not read, neither its K nor its V."""
    dims, tokens = tl.arange(0, DIMS), tl.arange(0, TILE)
    query, m_i, l_i, acc = tl.load(q + dims), float("-inf"), 0.0, tl.zeros([DIMS], tl.float32)
    for first in range(0, n, TILE):
        there = first + tokens < n
        blocks = tl.load(table + (first + tokens) // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        offsets = (blocks * block_stride + (first + tokens) % BLOCK_SIZE * DIMS)[:, None] + dims[None, :]
        k = tl.load(k_cache + offsets, mask=there[:, None], other=0.0)
        v = tl.load(v_cache + offsets, mask=there[:, None], other=0.0)
        scores = tl.where(there, tl.sum(k * query[None, :], axis=1), float("-inf"))
        higher = tl.maximum(m_i, tl.max(scores, axis=0))
        weights = tl.exp(scores - higher)
        acc = acc * tl.exp(m_i - higher) + tl.sum(weights[:, None] * v, axis=0)
        l_i, m_i = l_i * tl.exp(m_i - higher) + tl.sum(weights, axis=0), higher
    tl.store(out + dims, acc / l_i)
