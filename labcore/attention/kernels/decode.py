"""Paged decode attention: one query per sequence. Built in notebook 03.

    grid (S, Hkv, splits)            one program: the query heads of one sequence that share one KV head

    sequence 0 ─ KV head 0 ─ split 0   GQA packing: query heads 0 … G-1 are the rows of one tile, so each K and V is
                           └ split 1   read once, not G times (G = Hq / Hkv, padded to 16 rows for tensor cores)
               ─ KV head 1 ─ split 0
    sequence 1 …                       splits > 1 (split-KV), for few long sequences: each split attends to a range of
                                       keys and writes its output and log-sum-exp; `reduce_splits` combines them

Sources: Ainslie et al. 2023 (GQA), Dao et al. 2023 (Flash-Decoding).
"""

from __future__ import annotations

from labcore.attention.kernels.online_softmax import attend_tile, init_softmax_state, row_offsets, token_offsets
from labcore.attention.kernels.triton_mode import tl, triton


@triton.jit
def group_rows(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The query heads of a KV head as rows of a tile, [ROWS], and a mask of the rows that aren't padding.

    Query head h belongs to KV head h // GROUP.
    """
    rows = tl.arange(0, ROWS)
    return kv_head * GROUP + rows, rows < GROUP


@triton.jit
def split_range(seq_len, split, num_splits, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The keys of one split, [begin, end): an equal share, in whole tiles, of the keys in the sliding window.

    Computed on the device from the sequence's length, so a captured CUDA graph stays valid while sequences grow. With
    few tiles some splits are empty: begin >= end.
    """
    first = 0 if WINDOW is None else tl.maximum(seq_len - WINDOW, 0)
    keys_per_split = tl.cdiv(tl.cdiv(seq_len - first, TILE), num_splits) * TILE
    return first + split * keys_per_split, tl.minimum(first + (split + 1) * keys_per_split, seq_len)


@triton.jit(do_not_specialize=["table_stride"])
def paged_decode(
    out, log_totals, q, k_cache, v_cache, block_tables, seq_lens, sinks, scale, out_strides, q_strides, kv_strides,
    table_stride, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):
    """Attention of q, [S, Hq, D], over the keys of each sequence, to out, [S, Hq, splits, D].

    log_totals, [S, Hq, splits], receives each split's log-sum-exp (LSE), base 2; None with a single split.
    """
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads, valid = group_rows(kv_head, GROUP, ROWS)
    offsets, mask = row_offsets(seq * q_strides[0] + heads * q_strides[1], valid, q_strides[2], HEAD_DIM, DIMS)
    q_tile = tl.load(q + offsets, mask=mask, other=0.0)
    begin, end = split_range(tl.load(seq_lens + seq), split, tl.num_programs(2), WINDOW, TILE)
    acc, m_i, l_i = init_softmax_state(sinks, heads, valid & (split == 0), ROWS, DIMS)
    for key in range(begin, end, TILE):
        keys = key + tl.arange(0, TILE)
        present = keys < end
        key_offsets = token_offsets(block_tables + seq * table_stride, keys, present, kv_strides, BLOCK_SIZE)
        acc, m_i, l_i = attend_tile(
            acc, m_i, l_i, q_tile, k_cache, v_cache, key_offsets + kv_head * kv_strides[2], present,
            present[None, :], scale, kv_strides[3], HEAD_DIM, DIMS, SOFTCAP)
    l_i = tl.where(l_i == 0, 1.0, l_i)  # a split without keys: 0 / 1
    starts = seq * out_strides[0] + heads * out_strides[1] + split * out_strides[2]
    offsets, mask = row_offsets(starts, valid, out_strides[3], HEAD_DIM, DIMS)
    tl.store(out + offsets, acc / l_i[:, None], mask=mask)
    if log_totals is not None:
        offsets = (seq * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
        tl.store(log_totals + offsets, m_i + tl.log2(l_i), mask=valid)


@triton.jit
def reduce_splits(
    out, partial, log_totals, out_strides, partial_strides,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):
    """Combine the splits of each query head: out, [S, Hq, D], from partial, [S, Hq, splits, D]. Grid (S, Hq).

    Each split is weighted by its share of the sum of exponentials, from its LSE. Empty splits are not read.
    """
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    log_total = tl.load(log_totals + (seq * tl.num_programs(1) + head) * SPLITS + splits)
    starts = seq * partial_strides[0] + head * partial_strides[1] + splits * partial_strides[2]
    offsets, mask = row_offsets(starts, log_total > float("-inf"), partial_strides[3], HEAD_DIM, DIMS)
    parts = tl.load(partial + offsets, mask=mask, other=0.0)
    m_i = tl.max(log_total, axis=0)
    weights = tl.exp2(log_total - tl.where(m_i == float("-inf"), 0.0, m_i))
    l_i = tl.sum(weights, axis=0)
    result = tl.sum(weights[:, None] * parts, axis=0) / tl.where(l_i == 0, 1.0, l_i)
    offsets = seq * out_strides[0] + head * out_strides[1] + dims * out_strides[2]
    tl.store(out + offsets, result, mask=dims < HEAD_DIM)
