"""The Triton kernels against attention in float64: every shape, any garbage in unused memory, any order of the batch.

On a machine without a GPU they run in Triton's interpreter, on a GPU they run for real; the tests are the same.
"""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_batches import PagedBatch, paged_batch, reference

pytest.importorskip("triton", reason="Triton exists for Linux only")

from labcore.attention.backend import AttentionMetadata  # noqa: E402
from labcore.attention.kernels.launch import ScoreOptions, prefill_launch  # noqa: E402
from labcore.attention.kernels.tile_sizes import Tile  # noqa: E402
from labcore.attention.kernels.triton_mode import INTERPRETED  # noqa: E402
from labcore.attention.torch_backend import TorchAttention  # noqa: E402
from labcore.attention.triton_backend import TritonAttention  # noqa: E402
from labcore.kvcache.tensors import KVCache  # noqa: E402
from labcore.models.layers import LayerShape  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Absolute and relative, for values around 1: the inputs are rounded already, so this is what the kernels may add."""

HEAD_DIMS = [16, 32, 40, 64, 80, 96, 128, 256]
GROUPS = [1, 2, 3, 4, 6, 7, 8, 20, 32, 48]
BLOCK_SIZES = [1, 2, 3, 7, 16, 32, 100, 256]


def to_device(batch: PagedBatch) -> PagedBatch:
    """The batch on the device that the kernels run on."""
    if not INTERPRETED:
        batch.cache.k = [t.to(DEVICE) for t in batch.cache.k]
        batch.cache.v = [t.to(DEVICE) for t in batch.cache.v]
        batch.q, batch.k, batch.v = (t.to(DEVICE) for t in (batch.q, batch.k, batch.v))
        for name in ("slot_mapping", "block_tables", "seq_lens", "cu_seqlens"):
            setattr(batch.metadata, name, getattr(batch.metadata, name).to(DEVICE))
    return batch


class PrefillOnly(TritonAttention):
    """Takes the prefill kernel for decode steps, too: a mix may happen to be all decodes."""

    def attend(self, cache, layer, q, metadata, *, scaling, sliding_window=None, softcap=None, sinks=None):
        out = torch.empty_like(q)
        score_options = ScoreOptions(scaling, sliding_window, softcap, sinks)
        prefill_launch(out, q, cache.k[layer], cache.v[layer], metadata, score_options, self.tile).run()
        return out


def attend(batch: PagedBatch, backend: TritonAttention | None = None, **options) -> torch.Tensor:
    """One layer's work in a step: store the step's K and V, attend, and hand back the result on the CPU."""
    backend = backend or TritonAttention()
    to_device(batch)
    backend.store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    if isinstance(options.get("sinks"), torch.Tensor):
        options["sinks"] = options["sinks"].to(DEVICE)
    return backend.attend(batch.cache, 0, batch.q, batch.metadata, **options).cpu()


def assert_right(out: torch.Tensor, batch: PagedBatch, **options) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), reference(batch, **options), atol=tolerance, rtol=tolerance)


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after every element, and the first two dimensions swapped in memory."""
    wide = torch.full((t.shape[1], t.shape[0], *t.shape[2:], 2), float("nan"), dtype=t.dtype).transpose(0, 1)
    wide[..., 0] = t
    return wide[..., 0]


@st.composite
def batches(draw: st.DrawFn, queries: st.SearchStrategy[int]) -> tuple[PagedBatch, dict]:
    """A batch with its options: any shape that the kernels promise, garbage in every slot that nobody owns."""
    group = draw(st.sampled_from(GROUPS))
    num_kv_heads = draw(st.sampled_from([1, 2, 3] if group < 8 else [1]))
    seqs = draw(st.lists(st.tuples(st.one_of(st.integers(0, 6), st.integers(0, 75)), queries), min_size=1, max_size=3))
    batch = paged_batch(
        seqs,
        num_query_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=draw(st.sampled_from(DTYPES)),
        garbage=draw(st.sampled_from([float("nan"), float("inf"), 6e4])),
        poison=draw(st.sampled_from([0, -1, 2**31 - 1])),
        order=draw(st.sampled_from(["identity", "reversed", "random"])),
        seed=draw(st.integers(0, 2**16)),
    )
    if draw(st.booleans()):
        batch.cache.k, batch.cache.v = [strided(batch.cache.k[0])], [strided(batch.cache.v[0])]
        batch.q, batch.k, batch.v = strided(batch.q), strided(batch.k), strided(batch.v)
    sinks = torch.linspace(-2, 2, group * num_kv_heads) if draw(st.booleans()) else None
    window = draw(st.one_of(st.none(), st.integers(1, 40)))
    softcap = draw(st.sampled_from([None, 2.0, 30.0]))
    return batch, dict(scaling=0.3, sliding_window=window, softcap=softcap, sinks=sinks)


def shapes(max_examples: int):
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))


one_query = batches(st.just(1))
any_queries = batches(st.one_of(st.just(1), st.integers(1, 24)))
splits = st.sampled_from([1, 2, 4, 16])
decode_tiles = st.builds(lambda keys: Tile(64, keys, 4, 2), st.sampled_from([16, 32, 64]))
prefill_tiles = st.sampled_from([Tile(16, 16, 4, 2), Tile(16, 64, 4, 2), Tile(64, 16, 4, 2), Tile(64, 64, 4, 2)])


def check_decode(drawn: tuple[PagedBatch, dict], tile: Tile, num_splits: int) -> None:
    batch, options = drawn
    assert_right(attend(batch, TritonAttention(tile, num_splits), **options), batch, **options)


def check_prefill(drawn: tuple[PagedBatch, dict], tile: Tile) -> None:
    batch, options = drawn
    assert_right(attend(batch, PrefillOnly(tile), **options), batch, **options)


@shapes(10)
@given(drawn=one_query, tile=decode_tiles, num_splits=splits)
def test_decode_equals_float64_attention_on_any_shape(drawn, tile, num_splits):
    check_decode(drawn, tile, num_splits)


@shapes(10)
@given(drawn=any_queries, tile=prefill_tiles)
def test_any_mix_of_prefill_and_decode_equals_float64_attention_on_any_shape(drawn, tile):
    check_prefill(drawn, tile)


@pytest.mark.slow
@shapes(200)
@given(drawn=one_query, tile=decode_tiles, num_splits=splits)
def test_decode_equals_float64_attention_on_many_more_shapes(drawn, tile, num_splits):
    check_decode(drawn, tile, num_splits)


@pytest.mark.slow
@shapes(200)
@given(drawn=any_queries, tile=prefill_tiles)
def test_any_mix_equals_float64_attention_on_many_more_shapes(drawn, tile):
    check_prefill(drawn, tile)


KERNELS = {
    "decode": lambda: TritonAttention(Tile(16, 32, 4, 2), 1),
    "split decode": lambda: TritonAttention(Tile(16, 16, 4, 2), 4),
    "prefill": lambda: PrefillOnly(Tile(16, 32, 4, 2)),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -6e4])
def test_what_lies_in_unused_slots_never_reaches_the_output(kernel, dtype, garbage):
    seqs = [(n - 1, 1) for n in (1, 3, 15, 16, 17)]
    batch = paged_batch(seqs, num_query_heads=4, num_kv_heads=1, block_size=16, dtype=dtype, garbage=garbage)
    out = attend(batch, KERNELS[kernel](), scaling=0.25)
    assert torch.isfinite(out).all()
    assert_right(out, batch, scaling=0.25)


@each_kernel
def test_blocks_that_slid_out_of_the_window_may_hold_anything(kernel):
    """A window lets an engine give old blocks away: neither their slots nor their table entries may be looked at."""
    batch = paged_batch([(70, 1), (33, 1)], num_query_heads=4, num_kv_heads=2, block_size=8)
    options = dict(scaling=0.25, sliding_window=9)
    expected = reference(batch, **options)
    for seq, length in enumerate(batch.metadata.seq_lens_list):
        gone = (length - 9) // 8
        batch.cache.fill(float("nan"), batch.metadata.block_tables[seq, :gone].tolist())
        batch.metadata.block_tables[seq, :gone] = 2**31 - 1
    torch.testing.assert_close(attend(batch, KERNELS[kernel](), **options).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "queries"),
    [("decode", 1), ("prefill", 4), *(pytest.param(k, 1, marks=pytest.mark.slow) for k in ("split decode", "prefill"))],
)
def test_a_sequence_gets_the_same_answer_alone_and_in_every_order_of_the_batch(kernel, queries):
    seqs = [(n - queries, queries) for n in (5, 17, 33, 16)]
    batch = to_device(paged_batch(seqs, num_query_heads=2, num_kv_heads=1, block_size=16))
    backend = KERNELS[kernel]()
    backend.store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    rows = batch.q.split(queries)
    alone = [backend.attend(batch.cache, 0, rows[i], chosen(batch.metadata, [i]), scaling=0.25) for i in range(4)]
    for order in permutations(range(4)):
        q = torch.cat([rows[i] for i in order])
        together = backend.attend(batch.cache, 0, q, chosen(batch.metadata, order), scaling=0.25)
        assert torch.equal(together, torch.cat([alone[i] for i in order]))


def chosen(metadata: AttentionMetadata, seqs) -> AttentionMetadata:
    """The geometry of some of the sequences, in the order given."""
    seqs = list(seqs)
    queries = [metadata.query_lens_list[i] for i in seqs]
    return AttentionMetadata(
        slot_mapping=metadata.slot_mapping,
        block_tables=metadata.block_tables[seqs],
        seq_lens=metadata.seq_lens[seqs],
        cu_seqlens=torch.tensor([0, *queries], device=DEVICE).cumsum(0).to(torch.int32),
        block_size=metadata.block_size,
        seq_lens_list=[metadata.seq_lens_list[i] for i in seqs],
        query_lens_list=queries,
    )


@each_kernel
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 8), (28, 4), (12, 2), (32, 1), (48, 1), (20, 1)])
def test_each_query_head_reads_the_kv_head_of_its_group(kernel, heads):
    num_query_heads, num_kv_heads = heads
    batch = paged_batch([(6, 1)], num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, head_dim=64)
    values = torch.arange(num_kv_heads, dtype=torch.float32)[:, None].expand(-1, 64)
    batch.cache.v[0][:] = values
    batch.v[:] = values
    backend = KERNELS[kernel]()
    backend.tile = Tile(64, 32, 4, 2)
    out = attend(batch, backend, scaling=0.125)
    expected = torch.arange(num_query_heads) // (num_query_heads // num_kv_heads)
    torch.testing.assert_close(out[0], expected[:, None].expand(-1, 64).float())


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_integers_over_a_power_of_two_of_keys_is_exact(kernel, dtype):
    """All scores 0: every weight is 1 and every sum an integer, so there is nothing to round, in whatever order."""
    batch = paged_batch([(63, 1), (15, 1), (0, 1)], num_query_heads=4, num_kv_heads=2, dtype=dtype)
    gen = torch.Generator().manual_seed(0)
    batch.q.zero_()
    for seq, (_, v) in enumerate(batch.dense):
        v.copy_(torch.randint(-8, 9, v.shape, generator=gen))
        rewrite(batch, seq)
    out = attend(batch, KERNELS[kernel](), scaling=1.0)
    expected = torch.stack([v.double().mean(0).repeat_interleave(2, 0) for _, v in batch.dense])
    assert torch.equal(out.double(), expected)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_towers_over_the_others_hands_its_value_over_bit_by_bit(kernel, dtype):
    batch = paged_batch([(40, 1), (20, 1)], num_query_heads=2, num_kv_heads=1, dtype=dtype)
    batch.q.fill_(4.0)
    for seq, (k, _) in enumerate(batch.dense):
        k.zero_()
        k[7] = 4.0  # score 16 · 16 = 256 against 0: exp(-256) is 0 in float32
        rewrite(batch, seq)
    out = attend(batch, KERNELS[kernel](), scaling=1.0)
    assert torch.equal(out, torch.stack([v[7].expand(2, -1) for _, v in batch.dense]))


def rewrite(batch: PagedBatch, seq: int) -> None:
    """Put a sequence's changed dense K and V into the cache, and into the step's own k and v (one query each)."""
    k, v = batch.dense[seq]
    size = batch.metadata.block_size
    where = [int(batch.metadata.block_tables[seq, i // size]) * size + i % size for i in range(len(k) - 1)]
    batch.cache.k[0].flatten(0, 1)[where], batch.cache.v[0].flatten(0, 1)[where] = k[:-1], v[:-1]
    batch.k[seq], batch.v[seq] = k[-1], v[-1]


@each_kernel
def test_a_nan_stays_in_the_sequence_and_the_head_that_it_came_from(kernel):
    batch = paged_batch([(20, 1), (20, 1), (9, 1)], num_query_heads=4, num_kv_heads=2)
    batch.k[1, 0] = float("nan")
    out = attend(batch, KERNELS[kernel](), scaling=0.25)
    assert out[1, :2].isnan().all()
    expected = reference(batch, scaling=0.25)
    for rows in ((0, slice(None)), (2, slice(None)), (1, slice(2, 4))):
        torch.testing.assert_close(out[rows].double(), expected[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_sequence_of_length_0_gives_zeros_and_reads_nothing(num_splits, with_sinks):
    """The padding of a captured batch: no tokens, a table full of nonsense, a slot of -1."""
    batch = to_device(paged_batch([(5, 1), (5, 1)], poison=2**31 - 1))
    metadata = batch.metadata
    metadata.slot_mapping[1], metadata.seq_lens[1], metadata.seq_lens_list[1] = -1, 0, 0
    metadata.block_tables[1] = 2**31 - 1
    sinks = torch.ones(4) if with_sinks else None
    out = attend(batch, TritonAttention(Tile(16, 16, 4, 2), num_splits), scaling=0.25, sinks=sinks)
    assert torch.equal(out[1], torch.zeros(4, 16))
    expected = reference(batch, scaling=0.25, sinks=sinks)
    torch.testing.assert_close(out[0].double(), expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_may_see_nothing_in_its_first_tiles(dtype):
    """60 tokens in one tile of rows, a window of 3: the last row sees nothing in the first three tiles of keys."""
    batch = paged_batch([(0, 60), (40, 24)], num_query_heads=1, num_kv_heads=1, dtype=dtype)
    options = dict(scaling=0.25, sliding_window=3)
    assert_right(attend(batch, PrefillOnly(Tile(64, 16, 4, 2)), **options), batch, **options)


def test_sequences_without_queries_in_a_mixed_step_own_no_rows():
    batch = to_device(paged_batch([(3, 2), (4, 1), (8, 3)]))
    metadata = chosen(batch.metadata, [0, 1, 2])
    metadata.query_lens_list[1] = 0
    metadata.cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=DEVICE)
    TritonAttention().store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    out = TritonAttention(Tile(16, 16, 4, 2)).attend(batch.cache, 0, batch.q[[0, 1, 3, 4, 5]], metadata, scaling=0.25)
    expected = reference(batch, scaling=0.25)[[0, 1, 3, 4, 5]]
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", [40, 138_000])
def test_block_offsets_beyond_2_to_the_31_elements_find_the_right_slots(where):
    """8 KV heads of 128 in blocks of 16: 16,384 elements a block, so block 131,072 starts at element 2^31."""
    if not INTERPRETED and torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of GPU memory")
    layer = LayerShape(8, 8, 128)
    small = paged_batch([(39, 1)], num_query_heads=8, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.float16)
    big = KVCache([layer], 0, 16, torch.float16)
    pool = torch.empty(140_000, 16, 8, 128, dtype=torch.float16, device=DEVICE)  # untouched pages take no memory
    big.k, big.v = [pool], [torch.empty_like(pool)]
    blocks = [where + 2, where, where + 1]
    for ours, theirs in ((big.k[0], small.cache.k[0]), (big.v[0], small.cache.v[0])):
        ours[blocks] = theirs[small.metadata.block_tables[0].tolist()].to(DEVICE)
    expected = attend(small, TritonAttention(splits=1), scaling=0.1)
    metadata = chosen(small.metadata, [0])
    metadata.block_tables = torch.tensor([blocks], dtype=torch.int32, device=DEVICE)
    metadata.slot_mapping = torch.tensor([(where + 1) * 16 + 39 % 16], device=DEVICE)
    for backend in (TritonAttention(splits=1), PrefillOnly(Tile(16, 64, 4, 2))):
        backend.store(big, 0, small.k, small.v, metadata)
        backend.copy_blocks(big, [(where + 1, where + 3)])
        metadata.block_tables[0, 2] = where + 3
        out = backend.attend(big, 0, small.q, metadata, scaling=0.1).cpu()
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


def test_the_torch_backend_and_the_kernels_agree_on_every_kind_of_step():
    for seqs in ([(5, 1), (30, 1)], [(0, 7)], [(5, 1), (6, 4), (0, 3), (40, 1)]):
        batch = paged_batch(seqs, num_query_heads=6, num_kv_heads=2, head_dim=32)
        options = dict(scaling=0.2, sliding_window=8, softcap=5.0, sinks=torch.linspace(-1, 1, 6))
        out = attend(batch, TritonAttention(), **options)
        expected = attend(batch, TorchAttention(), **options)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
