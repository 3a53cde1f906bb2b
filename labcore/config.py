"""Engine settings: names, units, defaults and ranges.

An `EngineConfig` is made at start-up and passed down; no other module reads a setting from elsewhere. The command line's
options are derived from its fields (`labcore.cli.options`): annotations give their types, the docstring their help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["recompute", "swap"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
AttentionBackendName = Literal["auto", "torch", "triton", "custom"]
MAX_AUTO_BUDGET = 2048
"""Most tokens of a step under max_num_batched_tokens="auto"."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Every field is checked; a bad value raises `ValueError` that names the field and its range.

    device                   "auto", or a torch device: "cpu", "cuda", "cuda:1", …
    dtype                    "auto", or a torch dtype: "float32", "bfloat16", "float16"
    trust_remote_code        run the Python files that come with a model; False rejects a model that needs them
    block_size               tokens per KV block, 1 … 256
    num_blocks               KV blocks in the pool; None sizes the pool from memory
    gpu_memory_utilization   share of the GPU's memory that the engine may use in all, above 0 and up to 1 (cuda)
    kv_cache_memory_gb       GiB of host memory for the KV pool (cpu)
    max_model_len            most tokens of prompt and output together; None takes the model's limit
    max_num_seqs             most requests that run at once
    max_num_batched_tokens   token budget of one step, prefill and decode alike; "auto" adapts it to tbt_target_ms
    tbt_target_ms            time between tokens, in milliseconds, that an "auto" budget aims at
    enable_prefix_caching    reuse KV blocks whose tokens were computed before
    enable_chunked_prefill   split long prompts into chunks that share steps with decodes
    max_num_partial_prefills most prompts that one step may leave unfinished
    long_prefill_token_threshold   most tokens of one prompt in a step, so that shorter prompts overtake; 0 is off
    scheduling_policy        "fcfs", or "priority" (a smaller number goes first)
    priority_aging_steps     steps of waiting that are worth one priority number; prevents starvation ("priority")
    preemption_mode          KV of a preempted request: "recompute" it later, or "swap" it to the host
    num_host_blocks          KV blocks of host memory for swapped requests
    kv_cache_dtype           "auto" stores KV in the model's dtype; "int8" and "fp8" compress it
    attention_backend        "auto", "torch" or "triton"; "auto" takes Triton on a GPU
    cuda_graphs              replay decode steps from CUDA graphs (cuda, with the Triton backend)
    seed                     seed of requests that have none
    record                   keep a flight record of every step
    """

    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_gb: float = 1.0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | Literal["auto"] = 2048
    tbt_target_ms: float = 200.0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 4
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_aging_steps: int = 1000
    preemption_mode: PreemptionMode = "recompute"
    num_host_blocks: int = 0
    kv_cache_dtype: KVCacheDtype = "auto"
    attention_backend: AttentionBackendName = "auto"
    cuda_graphs: bool = False
    seed: int = 0
    record: bool = False

    def __post_init__(self) -> None:
        _whole("block_size", self.block_size, 1, 256)
        if self.num_blocks is not None:
            _whole("num_blocks", self.num_blocks, 1)
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2)
        _whole("max_num_seqs", self.max_num_seqs, 1)
        self._check_budget()
        _whole("priority_aging_steps", self.priority_aging_steps, 1)
        _whole("max_num_partial_prefills", self.max_num_partial_prefills, 1)
        _whole("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _whole("num_host_blocks", self.num_host_blocks, 0)
        _whole("seed", self.seed, 0, 2**63 - 1)
        _share("gpu_memory_utilization", self.gpu_memory_utilization, 1.0)
        _share("kv_cache_memory_gb", self.kv_cache_memory_gb, math.inf)
        _one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _one_of("preemption_mode", self.preemption_mode, get_args(PreemptionMode))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        for name in ("trust_remote_code", "enable_prefix_caching", "enable_chunked_prefill", "cuda_graphs", "record"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False.")

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that one step computes."""
        return MAX_AUTO_BUDGET if self.max_num_batched_tokens == "auto" else self.max_num_batched_tokens

    def _check_budget(self) -> None:
        _share("tbt_target_ms", self.tbt_target_ms, math.inf)
        if self.max_num_batched_tokens != "auto":
            _whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, or_else="auto")
        elif self.enable_chunked_prefill is False:
            raise ValueError("max_num_batched_tokens is 'auto'; it must be a number unless enable_chunked_prefill is True.")


def _whole(name: str, value: object, low: int, high: int | None = None, or_else: str = "") -> None:
    allowed = f"at least {low:,}" if high is None else f"from {low:,} to {high:,}"
    allowed += f", or {or_else!r}" if or_else else ""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {allowed}.")


def _share(name: str, value: object, high: float) -> None:
    allowed = "above 0" if high == math.inf else f"above 0 and up to {high:g}"
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value <= high or value == math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number {allowed}.")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")
