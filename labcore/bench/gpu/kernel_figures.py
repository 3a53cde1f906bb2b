"""Kernels on a GPU: correctness, then memory bandwidth, and speed relative to SDPA without paging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch.nn.functional import scaled_dot_product_attention

from labcore.attention.kernels.tile_sizes import Tile
from labcore.attention.sample_batch import Heads, PagedProblem, gathered, paged_problem
from labcore.attention.torch_backend import TorchAttention
from labcore.attention.triton_backend import TritonAttention
from labcore.bench.gpu.measurement_plan import Plan
from labcore.bench.gpu.timing import Deadline, DeviceTimes
from labcore.kvcache.tensors import KVCache

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest allowed error against float64, for values around 1."""


@dataclass(frozen=True)
class Check:
    """One comparison: its name, the largest error, and whether that is within tolerance."""

    what: str
    error: float
    ok: bool


def checks(plan: Plan, deadline: Deadline) -> Iterator[Check]:
    """All kernels against torch in float64, with NaN in unused memory; stores and copies bit for bit."""
    yield from move_checks(plan)
    for dtype, heads in product((plan.dtype, torch.float32), plan.check_heads):
        name = f"{str(dtype)[6:]}, {heads.query}/{heads.kv} heads of {heads.dim}"
        if not deadline.allows(f"checks in {name}", 15):
            continue
        sinks = torch.randn(heads.query, device=plan.device)
        extras = dict(sliding_window=128, softcap=30.0, sinks=sinks)
        for kind, seqs in (("decode", plan.decode_seqs), ("mixed", plan.mixed_seqs)):
            problem = paged_problem(seqs, heads, dtype, plan.device)
            yield attention_check(f"{kind}, {name}", problem, {})
            yield attention_check(f"{kind} with window, softcap and sinks, {name}", problem, extras)


def attention_check(what: str, problem: PagedProblem, options: dict) -> Check:
    """One step against the torch backend on copies of the same cache: in float64, or in float32 with options."""
    scaling = problem.q.shape[2] ** -0.5
    out = TritonAttention().attend(problem.cache, 0, problem.q, problem.metadata, scaling=scaling, **options)
    precision = torch.float32 if options else torch.float64
    exact = KVCache(problem.cache.layers, 0, problem.cache.block_size, precision)
    exact.k, exact.v = [problem.cache.k[0].to(precision)], [problem.cache.v[0].to(precision)]
    expected = TorchAttention().attend(exact, 0, problem.q.to(precision), problem.metadata, scaling=scaling, **options)
    error = (out - expected).abs().max().item()
    return Check(what, error, error <= TOLERANCE[out.dtype])  # NaN is not <= anything


def move_checks(plan: Plan) -> Iterator[Check]:
    """Stores and copies against torch, bit for bit: the error is the number of 16-bit words that differ."""
    heads = Heads(8, 8, 80)
    for dtype in (plan.dtype, torch.float32):
        ours, theirs = (paged_problem([(300, 40), (7, 7)], heads, dtype, plan.device) for _ in range(2))
        k, v = torch.randn(2, 47, heads.kv, heads.dim, device=plan.device).to(dtype)
        ours.metadata.slot_mapping[3] = theirs.metadata.slot_mapping[3] = -1
        for backend, problem in ((TritonAttention(), ours), (TorchAttention(), theirs)):
            backend.store(problem.cache, 0, k, v, problem.metadata)
            backend.copy_blocks(problem.cache, [(0, 19), (3, 7), (0, 5)])
        bits = [torch.stack(problem.cache.k + problem.cache.v).view(torch.int16) for problem in (ours, theirs)]
        different = int((bits[0] != bits[1]).sum())
        yield Check(f"store and copy, {str(dtype)[6:]}", different, different == 0)


@dataclass(frozen=True)
class DecodePoint:
    """Decode of `batch` sequences of `context` tokens: GB/s of K and V, share of copy bandwidth, speed relative to SDPA."""

    batch: int
    context: int
    times: DeviceTimes
    gb_per_s: float
    share_of_copy: float
    sdpa: DeviceTimes
    speed_against_sdpa: float


def decode_points(plan: Plan, copy_gb_per_s: float, deadline: Deadline) -> Iterator[DecodePoint]:
    """Measure the grid of batches and contexts. Setting up a point takes about four times the memory of its K and V."""
    per_token = 2 * plan.heads.kv * plan.heads.dim * plan.dtype.itemsize
    for batch, context in product(plan.batches, plan.contexts):
        what = f"decode, {batch} × {context}"
        if 4 * batch * context * per_token > plan.free_bytes():
            deadline.left_out.append(f"{what}: not enough memory")
        elif deadline.allows(what, 4):
            yield decode_point(plan, batch, context, copy_gb_per_s)


def decode_point(plan: Plan, batch: int, context: int, copy_gb_per_s: float) -> DecodePoint:
    """Measure one point, and SDPA on the same K and V without paging."""
    problem = paged_problem([(context, 1)] * batch, plan.heads, plan.dtype, plan.device)
    backend, scaling = TritonAttention(), plan.heads.dim**-0.5
    times = plan.time_of(lambda: backend.attend(problem.cache, 0, problem.q, problem.metadata, scaling=scaling))
    k, v = gathered(problem)
    q = problem.q[:, :, None]  # [S, Hq, 1, D]
    sdpa = plan.time_of(lambda: scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True))
    speed = problem.kv_bytes / times.median / 1e6
    return DecodePoint(batch, context, times, speed, speed / copy_gb_per_s, sdpa, sdpa.median / times.median)


@dataclass(frozen=True)
class PrefillPoint:
    """Causal prefill of `batch` prompts: TFLOP/s of the unmasked products, and speed relative to SDPA."""

    batch: int
    length: int
    times: DeviceTimes
    tflop_per_s: float
    sdpa: DeviceTimes
    speed_against_sdpa: float


def prefill_point(plan: Plan, batch: int, length: int) -> PrefillPoint:
    """Measure one point, and SDPA on the same K and V without paging."""
    heads = plan.heads
    problem = paged_problem([(length, length)] * batch, heads, plan.dtype, plan.device)
    backend, scaling = TritonAttention(), heads.dim**-0.5
    times = plan.time_of(lambda: backend.attend(problem.cache, 0, problem.q, problem.metadata, scaling=scaling))
    k, v = gathered(problem)
    q = problem.q.view(batch, length, heads.query, heads.dim).transpose(1, 2).contiguous()
    sdpa = plan.time_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    operations = 2 * 2 * batch * heads.query * heads.dim * length * (length + 1) / 2
    return PrefillPoint(batch, length, times, operations / times.median / 1e9, sdpa, sdpa.median / times.median)


def tile_sweep(plan: Plan, copy_gb_per_s: float, deadline: Deadline) -> Iterator[dict]:
    """Decode at the goal point with other tile sizes and splits, to tune the table of tile sizes."""
    batch, context = plan.goal_point
    problem = paged_problem([(context, 1)] * batch, plan.heads, plan.dtype, plan.device)
    for keys, warps, stages, splits in product((32, 64, 128), (2, 4, 8), (2, 3, 5), (1, 2)):
        tile = Tile(16, keys, warps, stages)
        if not deadline.allows(f"{tile}, {splits} splits", 3):
            continue
        backend = TritonAttention(tile, splits)
        yield {**asdict(tile), "splits": splits, **tried(plan, backend, problem, copy_gb_per_s)}


def tried(plan: Plan, backend: TritonAttention, problem: PagedProblem, copy_gb_per_s: float) -> dict:
    """Share of copy bandwidth, or the error if the tile exceeds the resources of this GPU."""
    try:
        times = plan.time_of(lambda: backend.attend(problem.cache, 0, problem.q, problem.metadata, scaling=0.1))
    except Exception as error:
        return {"error": type(error).__name__}
    return {"share_of_copy": round(problem.kv_bytes / times.median / 1e6 / copy_gb_per_s, 3)}
