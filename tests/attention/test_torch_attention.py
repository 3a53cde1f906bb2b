"""The torch backend against attention done one query and one head at a time, in pools full of NaN."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import paged_batch, reference

from labcore.attention.torch_backend import TorchAttention


def attend(batch, **options):
    backend = TorchAttention()
    backend.store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    return backend.attend(batch.cache, 0, batch.q, batch.metadata, **options)


@settings(max_examples=120, deadline=None)
@given(
    seqs=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 12))), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (9, 3)]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    window=st.sampled_from([None, 1, 3, 8, 100]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_prefill_and_decode_equals_the_reference(seqs, heads, block_size, window, softcap, with_sinks, seed):
    batch = paged_batch(seqs, num_query_heads=heads[0], num_kv_heads=heads[1], block_size=block_size, seed=seed)
    sinks = torch.linspace(-1, 1, heads[0]) if with_sinks else None
    options = dict(scaling=0.3, sliding_window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(attend(batch, **options).double(), reference(batch, **options), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_lies_in_slots_beyond_a_sequence_never_reaches_the_output(garbage):
    seqs = [(5, 1), (30, 1), (0, 7), (9, 3)]
    out = attend(paged_batch(seqs, garbage=garbage), scaling=0.25)
    assert torch.equal(out, attend(paged_batch(seqs, garbage=0.0), scaling=0.25))


def test_table_entries_beyond_the_length_are_never_looked_up():
    seqs = [(2, 1), (40, 1), (0, 3)]
    out = attend(paged_batch(seqs, poison=10**6), scaling=0.25)
    assert torch.equal(out, attend(paged_batch(seqs), scaling=0.25))


@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (1, 4, 1, 2), (5, 3, 2, 4)], ids=["decode", "mixed", "prefill"])
def test_a_sequence_gets_the_same_answer_alone_and_in_every_order_of_the_batch(queries):
    """Case: where the second request's KV lay was worked out without regard to the block size."""
    lens = (5, 17, 33, 16)
    batch = paged_batch([(n - q, q) for n, q in zip(lens, queries, strict=True)], block_size=16)
    TorchAttention().store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    rows = batch.q.split(queries)
    alone = [attend_to(batch, rows, [i]) for i in range(4)]
    for order in permutations(range(4)):
        expected = torch.cat([alone[i] for i in order])
        torch.testing.assert_close(attend_to(batch, rows, order), expected, atol=1e-6, rtol=1e-5)


def attend_to(batch, rows, seqs):
    """Attention of some of a batch's sequences, in the order given."""
    metadata, seqs = batch.metadata, list(seqs)
    lens = [metadata.query_lens_list[i] for i in seqs]
    chosen = type(metadata)(
        slot_mapping=metadata.slot_mapping,
        block_tables=metadata.block_tables[seqs],
        seq_lens=metadata.seq_lens[seqs],
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        block_size=metadata.block_size,
        seq_lens_list=[metadata.seq_lens_list[i] for i in seqs],
        query_lens_list=lens,
    )
    return TorchAttention().attend(batch.cache, 0, torch.cat([rows[i] for i in seqs]), chosen, scaling=0.25)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_softcap_and_sinks_work_in_every_dtype_of_the_cache(dtype, tolerance):
    batch = paged_batch([(5, 1), (9, 3), (0, 4)], dtype=dtype)
    options = dict(scaling=0.25, softcap=2.0, sinks=torch.linspace(-1, 1, 4))
    torch.testing.assert_close(attend(batch, **options).double(), reference(batch, **options), atol=tolerance, rtol=tolerance)


def test_slot_minus_one_writes_nothing():
    batch = paged_batch([(4, 4)])
    batch.metadata.slot_mapping[1] = -1
    before = batch.cache.k[0].clone()
    TorchAttention().store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    changed = ~torch.isclose(batch.cache.k[0], before, equal_nan=True).flatten(0, 1).flatten(1).all(1)
    assert sorted(changed.nonzero().flatten().tolist()) == sorted(s for s in batch.metadata.slot_mapping.tolist() if s >= 0)


def test_copies_read_every_source_before_they_write():
    batch = paged_batch([(16, 1)], garbage=0.0)
    before = batch.cache.k[0].clone(), batch.cache.v[0].clone()
    TorchAttention().copy_blocks(batch.cache, [(0, 1), (1, 2), (2, 0)])
    for tensor, old in zip((batch.cache.k[0], batch.cache.v[0]), before, strict=True):
        assert torch.equal(tensor[[1, 2, 0]], old[[0, 1, 2]]) and torch.equal(tensor[3:], old[3:])
    TorchAttention().copy_blocks(batch.cache, [])
