"""Write a step's K and V into the pool: one program per token, all its KV heads at once. Built in notebook 03.

    slot_mapping  [29, 44, -1]    slot = block * block_size + offset in the block
                    │   │   └ padding: writes nothing
                    │   └ token 1 → block 2, offset 12 (block_size 16)
                    └ token 0 → block 1, offset 13
"""

from __future__ import annotations

from labcore.attention.kernels.triton_mode import tl, triton


@triton.jit
def store_kv(
    k, v, k_cache, v_cache, slot_mapping, k_strides, v_strides, kv_strides,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
):
    """k and v, [T, Hkv, D], to their slots of the pool. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, DIMS)[None, :]
    inside = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    k_row = tl.load(k + token * k_strides[0] + heads * k_strides[1] + dims * k_strides[2], mask=inside)
    v_row = tl.load(v + token * v_strides[0] + heads * v_strides[1] + dims * v_strides[2], mask=inside)
    start = slot // BLOCK_SIZE * kv_strides[0] + slot % BLOCK_SIZE * kv_strides[1]
    tl.store(k_cache + start + heads * kv_strides[2] + dims * kv_strides[3], k_row, mask=inside)
    tl.store(v_cache + start + heads * kv_strides[2] + dims * kv_strides[3], v_row, mask=inside)
