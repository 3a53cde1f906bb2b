"""Competitors: paged decode kernels of other systems on the same problem, where installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from labcore.attention.sample_batch import PagedProblem, paged_problem
from labcore.bench.gpu.measurement_plan import Plan


def flashinfer_decode(problem: PagedProblem) -> Callable[[], object]:
    """FlashInfer's decode wrapper, planned once, as an engine does per step."""
    import flashinfer

    metadata, (pool, values) = problem.metadata, (problem.cache.k[0], problem.cache.v[0])
    counts = [-(-n // metadata.block_size) for n in metadata.seq_lens_list]
    device = problem.q.device
    indptr = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    indices = torch.cat([row[:count] for row, count in zip(metadata.block_tables, counts, strict=True)])
    last = torch.tensor([(n - 1) % metadata.block_size + 1 for n in metadata.seq_lens_list], dtype=torch.int32, device=device)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    num_heads, head_dim = problem.q.shape[1:]
    dtypes = dict(q_data_type=problem.q.dtype, kv_data_type=pool.dtype)
    wrapper.plan(indptr, indices, last, num_heads, pool.shape[2], head_dim, metadata.block_size, **dtypes)
    return lambda: wrapper.run(problem.q, (pool, values))


def flash_attention_decode(problem: PagedProblem) -> Callable[[], object]:
    """flash-attn's decode with a block table; its block size is a multiple of 256 tokens."""
    from flash_attn import flash_attn_with_kvcache

    metadata = problem.metadata
    q = problem.q[:, None]
    options = dict(cache_seqlens=metadata.seq_lens, block_table=metadata.block_tables, causal=True)
    return lambda: flash_attn_with_kvcache(q, problem.cache.k[0], problem.cache.v[0], **options)


def vllm_decode(problem: PagedProblem) -> Callable[[], object]:
    """vLLM's unified Triton kernel, called as its Triton backend calls it."""
    module = next(
        import_module(name)
        for name in ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")
        if find_spec(name) is not None
    )
    metadata, out = problem.metadata, torch.empty_like(problem.q)
    arguments = dict(
        q=problem.q,
        k=problem.cache.k[0],
        v=problem.cache.v[0],
        out=out,
        cu_seqlens_q=metadata.cu_seqlens,
        max_seqlen_q=1,
        seqused_k=metadata.seq_lens,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=problem.q.shape[2] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=metadata.block_tables,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return lambda: module.unified_attention(**arguments)


COMPETITORS = {
    "FlashInfer": ("flashinfer", flashinfer_decode, 16),
    "flash-attn": ("flash_attn", flash_attention_decode, 256),
    "vLLM Triton": ("vllm", vllm_decode, 16),
}
"""name → (package, function that prepares a call, block size)."""


def competitor_results(plan: Plan) -> dict[str, object]:
    """Name → milliseconds at the goal point of the plan, "not installed", or the error message."""
    batch, context = plan.goal_point
    results: dict[str, object] = {}
    for name, (package, setup, block_size) in COMPETITORS.items():
        if find_spec(package) is None:
            results[name] = "not installed"
            continue
        try:
            problem = paged_problem([(context, 1)] * batch, plan.heads, plan.dtype, plan.device, block_size)
            results[name] = plan.time_of(setup(problem)).median
        except Exception as error:  # third-party package of any version: report its error
            results[name] = f"{type(error).__name__}: {error}"[:200]
    return results
