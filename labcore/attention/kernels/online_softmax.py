"""Online softmax over one tile of keys for a tile of query rows; shared by decode and prefill. Built in notebook 03.

    rows: queries that share a KV head          keys: TILE logical tokens of one sequence, in any blocks
          ┌ D ┐                                       ┌──── TILE ────┐
    ROWS  │ q │   ·   K of the keys, transposed   =   │    scores    │  ROWS
          └   ┘                                       └──────────────┘

The tile size is independent of the block size: each key's block is looked up. Between tiles each row carries, as in
FlashAttention, `m_i`, the running maximum of its scores; `l_i`, the running sum of exp2(score - m_i); and `acc`, [D],
the sum of those weights times V. Scores are in units of log2, because the hardware computes exp2.

Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (FlashAttention), Kwon et al. 2023
(PagedAttention).
"""

from __future__ import annotations

from labcore.attention.kernels.triton_mode import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def token_offsets(block_table, tokens, present, kv_strides, BLOCK_SIZE: tl.constexpr):
    """Offsets in the pool, in elements, of logical tokens, [TILE], of one sequence; [TILE] int64.

        token 37, BLOCK_SIZE 16:   entry 37 // 16 = 2 of the table → block 19, and there slot 37 % 16 = 5

    Table entries are read only where `present`. Block ids are widened to int64 before the product: a pool may have
    more than 2^31 elements.
    """
    blocks = tl.load(block_table + tokens // BLOCK_SIZE, mask=present, other=0)  # the line that makes attention paged
    return blocks.to(tl.int64) * kv_strides[0] + tokens % BLOCK_SIZE * kv_strides[1]


@triton.jit
def scaled_scores(scores, scale, SOFTCAP: tl.constexpr):
    """Scores in units of log2: scaled and, with a SOFTCAP, SOFTCAP * tanh(score / SOFTCAP)."""
    if SOFTCAP is not None:
        doubled = scores * (scale * (2 * LOG2E / SOFTCAP))
        return (1 - 2 / (tl.exp2(doubled) + 1)) * (SOFTCAP * LOG2E)  # tanh, right at both ends
    return scores * (scale * LOG2E)


@triton.jit
def online_softmax(scores, m_i, l_i):
    """Add one tile of scores, [ROWS, TILE], to each row's running softmax.

    Returns the tile's weights, the rescaling factor of the earlier sums, and the new m_i and l_i. A row without a key
    so far has m_i = -inf; 0 is subtracted instead, because -inf - -inf is NaN.
    """
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    origin = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores - origin[:, None])
    rescale = tl.exp2(m_i - origin)
    return weights, rescale, m_new, l_i * rescale + tl.sum(weights, axis=1)


@triton.jit
def row_offsets(starts, valid, stride_dim, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Offsets and mask, [N, DIMS], of N rows of HEAD_DIM elements that begin at `starts`; DIMS is a power of two."""
    dims = tl.arange(0, DIMS)[None, :]
    return starts[:, None] + dims * stride_dim, valid[:, None] & (dims < HEAD_DIM)


@triton.jit
def attend_tile(
    acc, m_i, l_i, q, k_cache, v_cache, key_offsets, present, seen, scale, stride_dim,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Attend to the keys at `key_offsets`, [TILE]: returns the updated acc, m_i and l_i.

    present   [TILE]         keys to load; others load as 0, because an unused slot may hold NaN, and 0 * NaN is NaN
    seen      [ROWS, TILE]   attention mask; [1, TILE] if it is the same for all rows

    float32 products use "ieee" precision: the default rounds operands to TF32, with 10 bits of mantissa.
    """
    offsets, mask = row_offsets(key_offsets, present, stride_dim, HEAD_DIM, DIMS)
    k = tl.load(k_cache + offsets, mask=mask, other=0.0)
    scores = scaled_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
    weights, rescale, m_i, l_i = online_softmax(tl.where(seen, scores, float("-inf")), m_i, l_i)
    v = tl.load(v_cache + offsets, mask=mask, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, m_i, l_i


@triton.jit
def init_softmax_state(sinks, heads, valid, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """acc, m_i and l_i before the first key. An attention sink counts as a score already seen, with a V of 0."""
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        m_i = tl.load(sinks + heads, mask=valid, other=float("-inf")).to(tl.float32) * LOG2E
    return tl.zeros([ROWS, DIMS], tl.float32), m_i, tl.where(m_i == float("-inf"), 0.0, 1.0)
