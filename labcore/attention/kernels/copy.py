"""Copy whole blocks for copy-on-write: many pairs, K and V, every layer, one launch. Built in notebook 03.

    grid (pairs, pools, pieces)        pools: K of layer 0, K of layer 1, … V of layer 0, …: tensors of one geometry,
                                       given by how many elements each lies away from the first
    (7 → 19)  k[0]  ▓▓▓░░░  piece 0    a piece: up to PIECE elements of a block
              k[1]  …

Programs run in any order, so no block may be both read and written in one launch.
"""

from __future__ import annotations

from labcore.attention.kernels.triton_mode import tl, triton


@triton.jit
def copy_blocks(
    first_pool, distances, pairs, kv_strides,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr,
):
    """Copy block pairs[i, 0] to pairs[i, 1], [pairs, 2] int64, in every pool. Grid (pairs, pools, pieces).

    Distances, [pools] int64, are multiples of 16 elements: a thread may move 16 bytes at once, if the compiler is told.
    """
    pair, pool = pairs + 2 * tl.program_id(0), first_pool + tl.multiple_of(tl.load(distances + tl.program_id(1)), 16)
    src, dst = tl.load(pair).to(tl.int64) * kv_strides[0], tl.load(pair + 1).to(tl.int64) * kv_strides[0]
    element = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    slot, head, dim = element // (NUM_HEADS * HEAD_DIM), element // HEAD_DIM % NUM_HEADS, element % HEAD_DIM
    where, inside = slot * kv_strides[1] + head * kv_strides[2] + dim * kv_strides[3], slot < BLOCK_SIZE
    tl.store(pool + dst + where, tl.load(pool + src + where, mask=inside), mask=inside)
