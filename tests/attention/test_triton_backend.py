"""The Triton backend: what it stores, copies, refuses, how many splits it takes, and a whole engine that runs on it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from engines import poisoned_llm, run
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import paged_batch, reference
from tiny_models import prompt, tiny

pytest.importorskip("triton", reason="Triton exists for Linux only")

from labcore.attention.backend import AttentionBackend  # noqa: E402
from labcore.attention.kernels.decode import paged_decode  # noqa: E402
from labcore.attention.kernels.tile_sizes import DECODE, PREFILL, Tile, decode_tile, prefill_tile  # noqa: E402
from labcore.attention.kernels.triton_mode import INTERPRETED  # noqa: E402
from labcore.attention.select import select_backend  # noqa: E402
from labcore.attention.torch_backend import TorchAttention  # noqa: E402
from labcore.attention.triton_backend import MAX_SPLITS, TritonAttention, choose_splits  # noqa: E402
from labcore.kvcache.tensors import KVCache  # noqa: E402
from labcore.llm import LLM  # noqa: E402
from labcore.models import from_model  # noqa: E402
from labcore.models.layers import LayerShape  # noqa: E402
from labcore.sampling_params import SamplingParams  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
MOVED_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_cache(layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
    """A cache full of random numbers, a few NaN among them."""
    cache = KVCache(layers, num_blocks, block_size, dtype, DEVICE)
    gen = torch.Generator().manual_seed(0)
    for pool in cache.k + cache.v:
        pool.copy_(torch.randn(pool.shape, generator=gen))
        pool.flatten()[3] = float("nan")
    return cache


def bits(pools: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors' bit patterns, on the CPU: NaN equals NaN there."""
    return [pool.cpu().clone().view(torch.int16) for pool in pools]


def same_bits(pools: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(pools), expected, strict=True))


@pytest.mark.parametrize("dtype", MOVED_DTYPES)
def test_store_changes_the_named_slots_and_no_other_and_minus_one_none(dtype):
    """The last block is where -1 would wrap around to."""
    cache = random_cache([LayerShape(4, 3, 40)], 3, 4, dtype)
    k, v = (t.to(dtype).to(DEVICE) for t in torch.randn(2, 4, 3, 40))
    metadata = paged_batch([(0, 4)]).metadata
    metadata.slot_mapping = torch.tensor([5, -1, 9, -1], device=DEVICE)
    expected = bits(cache.k + cache.v)
    for pool, new in zip(expected, bits([k, v]), strict=True):
        pool.flatten(0, 1)[[5, 9]] = new[[0, 2]]
    TritonAttention().store(cache, 0, k, v, metadata)
    assert same_bits(cache.k + cache.v, expected)


@pytest.mark.parametrize("dtype", MOVED_DTYPES)
def test_copies_reach_every_layer_and_no_other_block(dtype):
    shapes = [LayerShape(4, 2, 40), LayerShape(4, 2, 40), LayerShape(4, 1, 64), LayerShape(4, 2, 40)]
    cache = random_cache(shapes, 9, 5, dtype)
    pairs = [(0, 3), (8, 1), (0, 2), (5, 7)]
    expected = bits(cache.k + cache.v)
    for pool in expected:
        for src, dst in pairs:
            pool[dst] = pool[src]
    TritonAttention().copy_blocks(cache, pairs)
    assert same_bits(cache.k + cache.v, expected)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6, unique_by=lambda pair: pair[1]),
    strided=st.booleans(),
)
def test_copies_that_chain_or_swap_do_what_the_torch_backend_does(pairs, strided):
    ours, theirs = (random_cache([LayerShape(2, 2, 16)] * 2, 6, 3, torch.float32) for _ in range(2))
    if strided:
        ours.k = [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in ours.k]
    TritonAttention().copy_blocks(ours, pairs)
    if pairs:
        TorchAttention().copy_blocks(theirs, pairs)
    assert same_bits(ours.k + ours.v, bits(theirs.k + theirs.v))


def test_many_sequences_of_like_length_are_not_split():
    assert choose_splits([4096] * 64, None, 8, max_programs=264) == 1


def test_one_long_sequence_is_split_until_every_processor_has_work():
    splits = choose_splits([32_768], None, 8, max_programs=264)
    assert splits * 8 >= 264 and splits <= MAX_SPLITS


def test_one_straggler_among_short_sequences_is_split():
    assert choose_splits([32_768] + [128] * 63, None, 8, max_programs=264) >= 16


def test_short_sequences_and_short_windows_are_not_split():
    assert choose_splits([200], None, 1, max_programs=264) == 1
    assert choose_splits([32_768], 128, 1, max_programs=264) == 1


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50), st.integers(1, 64), st.integers(1, 1000))
def test_the_number_of_splits_is_a_power_of_two_within_bounds(lens, heads, max_programs):
    splits = choose_splits(lens, None, heads, max_programs)
    assert 1 <= splits <= MAX_SPLITS and splits & (splits - 1) == 0


@given(st.sampled_from([0, 75, 80, 86, 89, 90, 100, 120]), st.integers(1, 256), st.sampled_from(MOVED_DTYPES))
def test_the_tables_have_a_tile_for_every_gpu_head_size_and_dtype(architecture, head_dim, dtype):
    tile = prefill_tile(architecture, head_dim, dtype)
    assert tile.rows >= 16 and tile.keys >= 16
    for group in (1, 3, 7, 48):
        assert decode_tile(architecture, head_dim, dtype, group).rows >= group


def test_every_row_of_the_tables_says_why():
    assert all(len(row.why) > 20 for row in DECODE + PREFILL)


@pytest.mark.parametrize(("architecture", "head_dim"), [(70, 64), (90, 257)])
def test_what_the_tables_do_not_hold_is_refused_by_name(architecture, head_dim):
    with pytest.raises(ValueError, match=f"head size {head_dim} on sm_{architecture}"):
        prefill_tile(architecture, head_dim, torch.float16)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU multiplies bfloat16 as it should")
def test_bfloat16_is_refused_in_the_interpreter_which_would_multiply_its_bit_patterns():
    batch = paged_batch([(4, 1)], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        TritonAttention().attend(batch.cache, 0, batch.q, batch.metadata, scaling=1.0)


def test_a_cache_of_another_dtype_than_the_queries_is_refused():
    batch = paged_batch([(4, 1)])
    with pytest.raises(ValueError, match="one dtype"):
        TritonAttention().attend(batch.cache, 0, batch.q.half(), batch.metadata, scaling=1.0)


def test_a_compiled_process_refuses_cpu_tensors_and_says_what_to_do():
    code = """
import os, sys
os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, "tests/support")
from labcore.attention.triton_backend import TritonAttention
from paged_batches import paged_batch
batch = paged_batch([(4, 1)])
try:
    TritonAttention().attend(batch.cache, 0, batch.q, batch.metadata, scaling=1.0)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "TRITON_INTERPRET=1" in done.stdout and "cpu" in done.stdout, done.stderr


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_the_interpreter_is_chosen_although_transformers_has_imported_triton_before():
    code = """
import sys
sys.path.insert(0, "tests/support")
import triton, triton.language
assert isinstance(triton.language.sum, triton.JITFunction)
from labcore.attention.triton_backend import TritonAttention
from paged_batches import paged_batch, reference
batch = paged_batch([(4, 1)])
backend = TritonAttention()
backend.store(batch.cache, 0, batch.k, batch.v, batch.metadata)
out = backend.attend(batch.cache, 0, batch.q, batch.metadata, scaling=1.0)
print((out - reference(batch, scaling=1.0)).abs().max().item() < 1e-5)
"""
    environment = {"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": ""}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "True", done.stderr


def test_a_kernel_of_ones_own_takes_the_place_of_labcores():
    calls = []

    class Counting:
        """paged_decode, and it counts its launches."""

        def __getitem__(self, grid):
            calls.append(grid)
            return paged_decode[grid]

    batch = paged_batch([(5, 1), (30, 1)])
    backends = TritonAttention(kernels={"paged_decode": Counting()}), TritonAttention()
    for backend in backends:
        backend.store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    theirs, ours = (backend.attend(batch.cache, 0, batch.q, batch.metadata, scaling=0.25) for backend in backends)
    assert torch.equal(theirs, ours) and calls == [(2, 2, 1)]


@pytest.mark.parametrize("splits", [0, -1, 3, 65, 128, True, 2.0, "2"])
def test_splits_that_are_no_power_of_two_in_range_are_refused(splits):
    with pytest.raises(ValueError, match=re.escape(f"splits is {splits!r}; it must be a power of two from 1 to 64, or None")):
        TritonAttention(splits=splits)


@pytest.mark.parametrize("splits", [1, 2, 64])
def test_splits_in_range_are_right(splits):
    batch, backend = paged_batch([(5, 1), (30, 1)]), TritonAttention(splits=splits)
    backend.store(batch.cache, 0, batch.k, batch.v, batch.metadata)
    out = backend.attend(batch.cache, 0, batch.q, batch.metadata, scaling=0.25)
    torch.testing.assert_close(out, reference(batch, scaling=0.25).float())


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        *(("rows", value, "a power of two from 1 to 256") for value in (0, -16, 3, 512, True, 16.0, None)),
        *(("keys", value, "a power of two from 16 to 256") for value in (0, 8, 24, 512, True, "64")),
        *(("warps", value, "a power of two from 1 to 32") for value in (0, 3, 64, True)),
        *(("stages", value, "a whole number of at least 1") for value in (0, -1, True, 1.5)),
    ],
)
def test_tile_sizes_that_no_kernel_can_have_are_refused_by_name_and_range(field, value, allowed):
    with pytest.raises(ValueError, match=re.escape(f"{field} is {value!r}; it must be {allowed}.")):
        Tile(**{"rows": 16, "keys": 64, "warps": 4, "stages": 1} | {field: value})


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("tile", (16, 64, 4, 1), "tile is (16, 64, 4, 1); it must be a Tile, or None"),
        ("kernels", {"paged_decod": paged_decode}, "kernels has 'paged_decod'; the kernels are store_kv, paged_decode, "),
        ("kernels", {"paged_decode": print}, "kernels['paged_decode'] is <built-in function print>; it must be a kernel"),
        ("kernels", ["paged_decode"], "kernels is ['paged_decode']; it must be a dictionary"),
    ],
)
def test_backend_arguments_that_would_fail_in_the_first_step_are_refused(argument, value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        TritonAttention(**{argument: value})


@pytest.mark.parametrize(
    ("kind", "dtype", "backend", "said"),
    [
        ("llama", torch.float32, TritonAttention(Tile(1, 16, 4, 1)), "a tile of 1 rows is too small for 4 query heads"),
        pytest.param(
            "llama", torch.bfloat16, "triton", "bfloat16",
            marks=pytest.mark.skipif(not INTERPRETED, reason="a GPU multiplies bfloat16 as it should"),
        ),
    ],
)  # fmt: skip
def test_backend_that_cannot_serve_a_model_is_refused_when_the_engine_is_made(kind, dtype, backend, said):
    """Not in the first step, and again in each step after it."""
    loaded = from_model(tiny(kind).to(DEVICE, dtype))
    with pytest.raises(ValueError, match=said):
        LLM(loaded, num_blocks=24, block_size=4, attention_backend=backend)


class NeedsAnArgument(TritonAttention):
    def __init__(self, splits):
        super().__init__(splits=splits)


@pytest.mark.parametrize("choice", [NeedsAnArgument, AttentionBackend, 3, None, object()])
def test_backend_choices_that_are_none_are_refused_by_name(choice):
    with pytest.raises(ValueError, match="^attention_backend is "):
        select_backend(choice, torch.device("cpu"))


def test_the_backend_is_chosen_by_name():
    assert isinstance(select_backend("triton", torch.device("cpu")), TritonAttention)


def spoken(kind: str, backend: str) -> dict[str, list[int]]:
    """Greedy tokens of a tiny model: prompts come in pieces beside requests that decode."""
    loaded = from_model(tiny(kind).to(DEVICE))
    settings = dict(num_blocks=24, block_size=4, max_num_batched_tokens=8)
    engine = poisoned_llm(loaded, **settings, attention_backend=backend).engine
    for i, length in enumerate((1, 13, 9)):
        engine.add_request(str(i), prompt(length, seed=i), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    return {request_id: list(output.outputs[0].token_ids) for request_id, output in run(engine).items()}


@pytest.mark.parametrize(
    "kind", ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gemma2", "gpt_oss"))]
)
def test_an_engine_on_the_kernels_says_what_an_engine_on_torch_says(kind):
    """Gemma 2 has windows and softcaps, gpt-oss has sinks; the pool is NaN wherever nobody owns a block."""
    assert spoken(kind, "triton") == spoken(kind, "torch")
