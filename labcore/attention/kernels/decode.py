"""Decode: one query per sequence, a long past. The step that an engine spends most of its time in. Built in notebook 03.

    grid (S, Hkv, splits)            one program: the queries of one sequence that share one KV head

    sequence 0 ─ KV head 0 ─ split 0   query heads 0 … G-1 are the rows of one tile, so that each K and V is read once
                           └ split 1   and not G times (G = Hq / Hkv, padded to 16 rows where tensor cores want them)
               ─ KV head 1 ─ split 0
    sequence 1 …                       splits > 1, for few and long sequences: each takes a stretch of the keys, and
                                       leaves its own result and total; `reduce_splits` puts them together

Sources: Ainslie et al. 2023 (GQA), Dao et al. 2023 (Flash-Decoding).
"""

from __future__ import annotations

from labcore.attention.kernels.online_softmax import attend_tile, first_state, token_offsets, vectors
from labcore.attention.kernels.triton_mode import tl, triton


@triton.jit
def group_rows(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The query heads that share a KV head, as the rows of a tile, [ROWS]; and which rows are heads, not padding.

    Query head h belongs to KV head h // GROUP.
    """
    rows = tl.arange(0, ROWS)
    return kv_head * GROUP + rows, rows < GROUP


@triton.jit
def split_range(seq_len, split, num_splits, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The keys of one split, [begin, end): an equal share, in whole tiles, of those that the window lets a query see.

    Worked out on the device from the sequence's own length, so that a captured CUDA graph stays right while sequences
    grow. In a sequence of few tiles some splits get nothing: begin >= end.
    """
    first = 0 if WINDOW is None else tl.maximum(seq_len - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(seq_len - first, TILE), num_splits) * TILE
    return first + split * share, tl.minimum(first + (split + 1) * share, seq_len)


@triton.jit(do_not_specialize=["table_stride"])
def paged_decode(
    out, log_totals, q, k_cache, v_cache, block_tables, seq_lens, sinks, scale, out_strides, q_strides, kv_strides,
    table_stride, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):
    """Attention of q, [S, Hq, D], over the keys of each sequence, to out, [S, Hq, splits, D].

    log_totals, [S, Hq, splits], gets log2 of each split's sum of exponentials; it is None if there is one split only.
    """
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads, valid = group_rows(kv_head, GROUP, ROWS)
    where, inside = vectors(seq * q_strides[0] + heads * q_strides[1], valid, q_strides[2], HEAD_DIM, DIMS)
    q_tile = tl.load(q + where, mask=inside, other=0.0)
    begin, end = split_range(tl.load(seq_lens + seq), split, tl.num_programs(2), WINDOW, TILE)
    acc, peak, total = first_state(sinks, heads, valid & (split == 0), ROWS, DIMS)
    for key in range(begin, end, TILE):
        keys = key + tl.arange(0, TILE)
        present = keys < end
        offsets = token_offsets(block_tables + seq * table_stride, keys, present, kv_strides, BLOCK_SIZE)
        acc, peak, total = attend_tile(
            acc, peak, total, q_tile, k_cache, v_cache, offsets + kv_head * kv_strides[2], present,
            present[None, :], scale, kv_strides[3], HEAD_DIM, DIMS, SOFTCAP)
    total = tl.where(total == 0, 1.0, total)  # a split without keys: 0 / 1
    starts = seq * out_strides[0] + heads * out_strides[1] + split * out_strides[2]
    where, inside = vectors(starts, valid, out_strides[3], HEAD_DIM, DIMS)
    tl.store(out + where, acc / total[:, None], mask=inside)
    if log_totals is not None:
        where = (seq * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
        tl.store(log_totals + where, peak + tl.log2(total), mask=valid)


@triton.jit
def reduce_splits(
    out, partial, log_totals, out_strides, partial_strides,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):
    """Put the splits of one query head together: out, [S, Hq, D], from partial, [S, Hq, splits, D]. Grid (S, Hq).

    A split whose exponentials sum to total_i has the share total_i / sum(total) of the result. Empty ones are not read.
    """
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    log_total = tl.load(log_totals + (seq * tl.num_programs(1) + head) * SPLITS + splits)
    starts = seq * partial_strides[0] + head * partial_strides[1] + splits * partial_strides[2]
    where, inside = vectors(starts, log_total > float("-inf"), partial_strides[3], HEAD_DIM, DIMS)
    parts = tl.load(partial + where, mask=inside, other=0.0)
    peak = tl.max(log_total, axis=0)
    weights = tl.exp2(log_total - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, axis=0)
    result = tl.sum(weights[:, None] * parts, axis=0) / tl.where(total == 0, 1.0, total)
    where = seq * out_strides[0] + head * out_strides[1] + dims * out_strides[2]
    tl.store(out + where, result, mask=dims < HEAD_DIM)
