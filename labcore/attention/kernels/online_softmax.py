"""One tile of keys, folded into the attention of a tile of query rows: what decode and prefill have in common.

    rows: queries that share a KV head          keys: TILE logical tokens of one sequence, in any blocks
          ┌ D ┐                                       ┌──── TILE ────┐
    ROWS  │ q │   ·   K of the keys, transposed   =   │    scores    │  ROWS
          └   ┘                                       └──────────────┘

A tile's length has nothing to do with the block size: every key looks its own block up. Between tiles a row keeps three
things: `peak`, the highest score so far; `total`, the sum of exp2(score - peak); and `acc`, the sum of those weights
times V, [D]. Scores are in units of log2, because exp2 is what the hardware computes.

Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (FlashAttention), Kwon et al. 2023
(PagedAttention).
Built in notebook 03.
"""

from __future__ import annotations

from labcore.attention.kernels.triton_mode import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def token_offsets(block_table, tokens, present, kv_strides, BLOCK_SIZE: tl.constexpr):
    """Where the logical tokens, [TILE], of one sequence begin in the pool, counted in elements, [TILE] int64.

        token 37, BLOCK_SIZE 16:   entry 37 // 16 = 2 of the table → block 19, and there slot 37 % 16 = 5

    Only entries of tokens that are `present` are read: what the table holds beyond the sequence doesn't matter. The
    block id is widened before the product, because a pool has more than 2^31 elements sooner than one thinks.
    """
    blocks = tl.load(block_table + tokens // BLOCK_SIZE, mask=present, other=0)  # the line that makes attention paged
    return blocks.to(tl.int64) * kv_strides[0] + tokens % BLOCK_SIZE * kv_strides[1]


@triton.jit
def scaled_scores(scores, scale, SOFTCAP: tl.constexpr):
    """Scores in units of log2: scaled, and with a SOFTCAP squashed to SOFTCAP * tanh(score / SOFTCAP)."""
    if SOFTCAP is not None:
        doubled = scores * (scale * (2 * LOG2E / SOFTCAP))
        return (1 - 2 / (tl.exp2(doubled) + 1)) * (SOFTCAP * LOG2E)  # tanh, right at both ends
    return scores * (scale * LOG2E)


@triton.jit
def online_softmax(scores, peak, total):
    """Let one more tile of scores, [ROWS, TILE], into each row's softmax.

    Returns the tile's weights, the factor for everything summed before it, and the new peak and total. A row that has
    seen no key yet has the peak -inf; it is measured from 0 instead, as -inf - -inf is NaN.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - origin[:, None])
    rescale = tl.exp2(peak - origin)
    return weights, rescale, new_peak, total * rescale + tl.sum(weights, axis=1)


@triton.jit
def vectors(starts, valid, stride_dim, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Offsets and mask, [N, DIMS], of N vectors of HEAD_DIM elements that begin at `starts`. DIMS is a power of two."""
    dims = tl.arange(0, DIMS)[None, :]
    return starts[:, None] + dims * stride_dim, valid[:, None] & (dims < HEAD_DIM)


@triton.jit
def attend_tile(
    acc, peak, total, q, k_cache, v_cache, offsets, present, seen, scale, stride_dim,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Fold the keys at `offsets`, [TILE], into the rows' acc, peak and total.

    present   [TILE]         the keys to read. A masked load gives 0: an unused slot may hold NaN, and 0 * NaN is NaN.
    seen      [ROWS, TILE]   which row may look at which key; [1, TILE] if all rows see the same

    float32 is multiplied as such ("ieee"): the default would round the operands to TF32, with 10 bits of mantissa.
    """
    where, inside = vectors(offsets, present, stride_dim, HEAD_DIM, DIMS)
    k = tl.load(k_cache + where, mask=inside, other=0.0)
    scores = scaled_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
    weights, rescale, peak, total = online_softmax(tl.where(seen, scores, float("-inf")), peak, total)
    v = tl.load(v_cache + where, mask=inside, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def first_state(sinks, heads, valid, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """acc, peak and total before the first key. A sink is a score that was seen already, and that brought no V."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + heads, mask=valid, other=float("-inf")).to(tl.float32) * LOG2E
    return tl.zeros([ROWS, DIMS], tl.float32), peak, tl.where(peak == float("-inf"), 0.0, 1.0)
