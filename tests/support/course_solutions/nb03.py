"""Right and wrong answers to the exercises of notebook 03: what the checks must accept and must refuse."""

from __future__ import annotations

from labcore.attention.kernels.decode import group_rows, paged_decode, reduce_splits, split_range
from labcore.attention.kernels.online_softmax import attend_tile, init_softmax_state, online_softmax, row_offsets, token_offsets
from labcore.attention.kernels.triton_mode import tl, triton
from labcore.course.exercises.nb03_planted import colleagues_decode, mended_decode


class With:
    """A kernel with some of its constants given already. (Kernels know no closures.)"""

    def __init__(self, kernel, **constants):
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel[grid](*args, **kwargs, **self.constants)


@triton.jit
def softmax_by_natural_steps(scores, m_i, l_i):
    """The rescale factor first, by a select; the weights masked by hand."""
    highest = tl.max(scores, 1)
    higher = tl.where(highest > m_i, highest, m_i)
    seen = higher > float("-inf")
    rescale = tl.where(m_i > float("-inf"), tl.exp2(m_i - tl.where(seen, higher, 0.0)), 0.0)
    weights = tl.where(scores > float("-inf"), tl.exp2(scores - tl.where(seen, higher, 0.0)[:, None]), 0.0)
    return weights, rescale, higher, tl.sum(weights, 1) + rescale * l_i


@triton.jit
def forgets_the_total(scores, m_i, l_i):
    new = tl.maximum(m_i, tl.max(scores, axis=1))
    origin = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - origin[:, None])
    return weights, tl.exp2(m_i - origin), new, l_i + tl.sum(weights, axis=1)


@triton.jit
def rescales_the_wrong_way(scores, m_i, l_i):
    new = tl.maximum(m_i, tl.max(scores, axis=1))
    origin = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - origin[:, None])
    rescale = tl.exp2(origin - tl.where(m_i == float("-inf"), origin, m_i))
    return weights, rescale, new, l_i * rescale + tl.sum(weights, axis=1)


@triton.jit
def keeps_the_tiles_own_peak(scores, m_i, l_i):
    new = tl.max(scores, axis=1)
    origin = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - origin[:, None])
    rescale = tl.exp2(m_i - origin)
    return weights, rescale, new, l_i * rescale + tl.sum(weights, axis=1)


@triton.jit
def forgets_that_a_row_may_see_nothing(scores, m_i, l_i):
    new = tl.maximum(m_i, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new[:, None])
    rescale = tl.exp2(m_i - new)
    return weights, rescale, new, l_i * rescale + tl.sum(weights, axis=1)


@triton.jit
def takes_e_for_two(scores, m_i, l_i):
    new = tl.maximum(m_i, tl.max(scores, axis=1))
    origin = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - origin[:, None])
    rescale = tl.exp(m_i - origin)
    return weights, rescale, new, l_i * rescale + tl.sum(weights, axis=1)


@triton.jit
def group_rows_by_the_first_head(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    first = kv_head * GROUP
    heads = tl.arange(0, ROWS) + first
    return heads, heads < first + GROUP


@triton.jit
def group_rows_interleaved(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    return rows * GROUP + kv_head, rows < GROUP


@triton.jit
def group_rows_all_valid(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    return kv_head * GROUP + rows, rows < ROWS


@triton.jit
def group_rows_valid_by_head(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    heads = kv_head * GROUP + tl.arange(0, ROWS)
    return heads, heads < GROUP


@triton.jit
def group_rows_one_too_many(kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    return kv_head * GROUP + rows, rows <= GROUP


@triton.jit
def masked_decode(
    out, log_totals, q, k_cache, v_cache, block_tables, seq_lens, sinks, scale, out_strides, q_strides, kv_strides,
    table_stride, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
    PRESENT: tl.constexpr,
):  # fmt: skip
    """paged_decode with another mask, PRESENT(keys, end, seq_len)."""
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads, valid = group_rows(kv_head, GROUP, ROWS)
    offsets, mask = row_offsets(seq * q_strides[0] + heads * q_strides[1], valid, q_strides[2], HEAD_DIM, DIMS)
    q_tile = tl.load(q + offsets, mask=mask, other=0.0)
    seq_len = tl.load(seq_lens + seq)
    begin, end = split_range(seq_len, split, tl.num_programs(2), WINDOW, TILE)
    acc, m_i, l_i = init_softmax_state(sinks, heads, valid & (split == 0), ROWS, DIMS)
    for key in range(begin, end, TILE):
        keys = key + tl.arange(0, TILE)
        present = PRESENT(keys, end, seq_len)
        in_table = present & (keys < tl.cdiv(seq_len, BLOCK_SIZE) * BLOCK_SIZE)  # beyond it there is no memory to read
        key_offsets = token_offsets(block_tables + seq * table_stride, keys, in_table, kv_strides, BLOCK_SIZE)
        acc, m_i, l_i = attend_tile(
            acc, m_i, l_i, q_tile, k_cache, v_cache, key_offsets + kv_head * kv_strides[2], in_table,
            present[None, :], scale, kv_strides[3], HEAD_DIM, DIMS, SOFTCAP)  # fmt: skip
    l_i = tl.where(l_i == 0, 1.0, l_i)
    starts = seq * out_strides[0] + heads * out_strides[1] + split * out_strides[2]
    offsets, mask = row_offsets(starts, valid, out_strides[3], HEAD_DIM, DIMS)
    tl.store(out + offsets, acc / l_i[:, None], mask=mask)
    if log_totals is not None:
        offsets = (seq * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
        tl.store(log_totals + offsets, m_i + tl.log2(l_i), mask=valid)


@triton.jit
def by_distance(keys, end, seq_len):
    return end - keys > 0


@triton.jit
def everything(keys, end, seq_len):
    return keys >= 0


@triton.jit
def one_key_more(keys, end, seq_len):
    return keys <= end


@triton.jit
def up_to_the_last_token(keys, end, seq_len):
    return keys < seq_len


@triton.jit
def one_key_less(keys, end, seq_len):
    return keys < end - 1


@triton.jit
def joining_reduce(
    out, partial, log_totals, out_strides, partial_strides,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """reduce_splits with another way to join, JOIN(log_total, parts)."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    log_total = tl.load(log_totals + (seq * tl.num_programs(1) + head) * SPLITS + splits)
    starts = seq * partial_strides[0] + head * partial_strides[1] + splits * partial_strides[2]
    offsets, mask = row_offsets(starts, log_total > float("-inf"), partial_strides[3], HEAD_DIM, DIMS)
    result = JOIN(log_total, tl.load(partial + offsets, mask=mask, other=0.0))
    offsets = seq * out_strides[0] + head * out_strides[1] + dims * out_strides[2]
    tl.store(out + offsets, result, mask=dims < HEAD_DIM)


@triton.jit
def by_shares(log_total, parts):
    m_i = tl.max(log_total, 0)
    shares = tl.where(log_total > float("-inf"), tl.exp2(log_total - m_i), 0.0)
    return tl.sum(parts * (shares / tl.maximum(tl.sum(shares, 0), 1.0))[:, None], 0)


@triton.jit
def plain_mean(log_total, parts):
    return tl.sum(parts, axis=0) / tl.sum(tl.where(log_total > float("-inf"), 1.0, 0.0), axis=0)


@triton.jit
def without_a_peak(log_total, parts):
    weights = tl.exp2(log_total)
    l_i = tl.sum(weights, axis=0)
    return tl.sum(weights[:, None] * parts, axis=0) / tl.where(l_i == 0, 1.0, l_i)


@triton.jit
def without_the_total(log_total, parts):
    m_i = tl.max(log_total, axis=0)
    weights = tl.exp2(log_total - tl.where(m_i == float("-inf"), 0.0, m_i))
    return tl.sum(weights[:, None] * parts, axis=0)


@triton.jit
def with_nan_for_nobody(log_total, parts):
    weights = tl.exp2(log_total - tl.max(log_total, axis=0))
    return tl.sum(weights[:, None] * parts, axis=0) / tl.sum(weights, axis=0)


@triton.jit
def weighs_by_the_logarithm(log_total, parts):
    weights = tl.where(log_total > float("-inf"), log_total, 0.0)
    l_i = tl.sum(weights, axis=0)
    return tl.sum(weights[:, None] * parts, axis=0) / tl.where(l_i == 0, 1.0, l_i)


@triton.jit
def hunted_decode(
    out, q, k_cache, v_cache, table, n, block_stride,
    BLOCK_SIZE: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """colleagues_decode with another way to read V, VALUES(v_cache, spot, alive)."""
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
        acc = acc * tl.exp(best - top) + tl.sum(weight[:, None] * VALUES(v_cache, spot, alive), axis=0)
        weight_sum, best = weight_sum * tl.exp(best - top) + tl.sum(weight, axis=0), top
    tl.store(out + dims, acc / weight_sum)


@triton.jit
def zero_where_it_is_not_alive(v_cache, spot, alive):
    return tl.where(alive[:, None], tl.load(v_cache + spot), 0.0)


@triton.jit
def times_zero(v_cache, spot, alive):
    return tl.load(v_cache + spot) * alive[:, None]


@triton.jit
def half_of_them(v_cache, spot, alive):
    return tl.load(v_cache + spot, mask=(alive[:, None]) & (spot % 2 == 0), other=0.0)


RIGHT = {
    "03.rescale": [online_softmax, softmax_by_natural_steps],
    "03.group_rows": [group_rows, group_rows_by_the_first_head],
    "03.last_block": [
        paged_decode,
        With(masked_decode, PRESENT=by_distance),
        With(masked_decode, PRESENT=up_to_the_last_token),  # a split is whole tiles, so no tile reaches into the next
    ],
    "03.join_splits": [reduce_splits, With(joining_reduce, JOIN=by_shares)],
    "03.used_slots": [mended_decode, With(hunted_decode, VALUES=zero_where_it_is_not_alive)],
}

WRONG = {
    "03.rescale": [
        (forgets_the_total, "total of all four weights"),
        (rescales_the_wrong_way, "rescale"),
        (keeps_the_tiles_own_peak, "the peak is 2"),
        (forgets_that_a_row_may_see_nothing, "NaN"),
        (takes_e_for_two, "weights"),
    ],
    "03.group_rows": [
        (group_rows_interleaved, "query heads of its first 4 rows"),
        (group_rows_all_valid, "padding"),
        (group_rows_valid_by_head, "padding"),
        (group_rows_one_too_many, "padding"),
    ],
    "03.last_block": [
        (With(masked_decode, PRESENT=everything), "not finite"),
        (With(masked_decode, PRESENT=one_key_more), "17 tokens"),
        (With(masked_decode, PRESENT=one_key_less), "16 tokens"),
    ],
    "03.join_splits": [
        (With(joining_reduce, JOIN=plain_mean), "1 and 3"),
        (With(joining_reduce, JOIN=without_a_peak), "501 and 503"),
        (With(joining_reduce, JOIN=without_the_total), "3 and 3"),
        (With(joining_reduce, JOIN=with_nan_for_nobody), "neither split"),
        (With(joining_reduce, JOIN=weighs_by_the_logarithm), "1 and 3"),
    ],
    "03.used_slots": [
        (colleagues_decode, "not finite"),
        (With(hunted_decode, VALUES=times_zero), "not finite"),
        (With(hunted_decode, VALUES=half_of_them), "the result is"),
    ],
}
