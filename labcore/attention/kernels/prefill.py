"""Prefill, and any mix of prefill and decode: queries of many sequences in one launch. Built in notebook 03.

A row of a tile is a pair (token, head of the group), head fastest: with G query heads per KV head, n query tokens are a
run of n * G rows, cut into tiles of ROWS. No tile holds rows of two sequences:

    cu_seqlens [0, 1, 4, 6]: a decodes, b and c are in their prompts        G = 4, ROWS = 8

    tile 0           tile 1           tile 2           tile 3           tile 4
    a0a0a0a0         b0b0b0b0b1b1b1b1 b2b2b2b2         (left over)      c0c0c0c0c1c1c1c1

    first tile of s:  cu_seqlens[s] * G // ROWS + s      a: 0   b: 4 // 8 + 1 = 1   c: 16 // 8 + 2 = 4

The formula leaves every sequence at least the tiles it needs, and no list of tiles has to travel from the host: a tile
finds its owner by binary search in cu_seqlens. Tiles that are left over return at once.

Source: the query blocks of vLLM's unified Triton attention kernel.
"""

from __future__ import annotations

from labcore.attention.kernels.online_softmax import attend_tile, first_state, token_offsets, vectors
from labcore.attention.kernels.triton_mode import tl, triton


@triton.jit
def first_tile(cu_seqlens, seq, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The first tile of sequence `seq`."""
    return tl.load(cu_seqlens + seq) * GROUP // ROWS + seq


@triton.jit
def find_owner(cu_seqlens, tile, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sequence that a tile belongs to, its tokens [start, stop), and where among its rows the tile begins.

    The owner is the last sequence whose first tile is not after this one.
    """
    seq, high = 0, num_seqs
    while high - seq > 1:
        middle = (seq + high) // 2
        before = first_tile(cu_seqlens, middle, GROUP, ROWS) <= tile
        seq, high = tl.where(before, middle, seq), tl.where(before, high, middle)
    first_row = (tile - first_tile(cu_seqlens, seq, GROUP, ROWS)) * ROWS
    return seq, tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1), first_row


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def paged_prefill(
    out, q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens, sinks, scale, num_seqs, out_strides, q_strides,
    kv_strides, table_stride, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):
    """Causal attention of q, [T, Hq, D], over each sequence's history and its own queries; out has q's shape.

    Grid (T * G // ROWS + S, Hkv).
    """
    kv_head = tl.program_id(1)
    seq, start, stop, first_row = find_owner(cu_seqlens, tl.program_id(0), num_seqs, GROUP, ROWS)
    if first_row >= (stop - start) * GROUP:
        return
    seq_len, rows = tl.load(seq_lens + seq), first_row + tl.arange(0, ROWS)
    history, tokens, heads = seq_len - (stop - start), start + rows // GROUP, kv_head * GROUP + rows % GROUP
    starts = tokens.to(tl.int64) * q_strides[0] + heads * q_strides[1]
    where, inside = vectors(starts, tokens < stop, q_strides[2], HEAD_DIM, DIMS)
    q_tile = tl.load(q + where, mask=inside, other=0.0)
    first = 0 if WINDOW is None else tl.maximum(history + first_row // GROUP - WINDOW + 1, 0)
    last = tl.minimum(history + (first_row + ROWS - 1) // GROUP + 1, seq_len)
    acc, peak, total = first_state(sinks, heads, tokens < stop, ROWS, DIMS)
    for key in range(first, last, TILE):
        keys = key + tl.arange(0, TILE)
        present, age = keys < last, (history + rows // GROUP)[:, None] - keys[None, :]
        seen = age >= 0 if WINDOW is None else (age >= 0) & (age < WINDOW)
        offsets = token_offsets(block_tables + seq * table_stride, keys, present, kv_strides, BLOCK_SIZE)
        acc, peak, total = attend_tile(
            acc, peak, total, q_tile, k_cache, v_cache, offsets + kv_head * kv_strides[2], present,
            seen, scale, kv_strides[3], HEAD_DIM, DIMS, SOFTCAP)
    starts = tokens.to(tl.int64) * out_strides[0] + heads * out_strides[1]
    where, inside = vectors(starts, tokens < stop, out_strides[2], HEAD_DIM, DIMS)
    tl.store(out + where, acc / tl.where(total == 0, 1.0, total)[:, None], mask=inside)
