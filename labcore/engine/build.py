"""Assembly: builds an engine from its parts, labcore's own or those that a caller plugs in."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from labcore.attention.backend import AttentionBackend
from labcore.attention.torch_backend import TorchAttention
from labcore.config import EngineConfig
from labcore.engine.engine import Engine
from labcore.engine.model_runner import ModelRunner
from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import HashedPrefixCache, NoPrefixCache, PrefixCache
from labcore.kvcache.sizing import available_memory, bytes_per_block, check_memory, memory_budget, pool_size
from labcore.kvcache.tensors import KVCache
from labcore.models import LoadedModel
from labcore.recorder import Recorder
from labcore.sampling.beam_search import BeamSearch
from labcore.scheduler.budget import AdaptiveBudget
from labcore.scheduler.chunking import ChunkedPrefill, ChunkPolicy, WholePrompts
from labcore.scheduler.policy import FirstComeFirstServed, Policy, PriorityWithAging
from labcore.scheduler.preemption import Preemption, Recompute
from labcore.scheduler.scheduler import Scheduler

Part = TypeVar("Part")


def build_engine(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    backend: AttentionBackend,
    block_pool: BlockPool | type[BlockPool] | None = None,
    block_table: type[BlockTable] | None = None,
    kv_cache_manager: type[KVCacheManager] | None = None,
    scheduler: type[Scheduler] | None = None,
    prefix_cache: PrefixCache | type[PrefixCache] | None = None,
    preemption: Preemption | type[Preemption] | None = None,
    chunking: ChunkPolicy | type[ChunkPolicy] | None = None,
    policy: Policy | type[Policy] | None = None,
    budget: AdaptiveBudget | type[AdaptiveBudget] | None = None,
    beam_search: type[BeamSearch] | None = None,
) -> Engine:
    """Build an engine. A pluggable part is a class, which is called here, or an instance, which is used as it is.

    A BlockPool class is called with (num_blocks, block_size), a PrefixCache class with (block_size), a KVCacheManager class
    with both and the class of the tables, a Scheduler class with the manager and the keywords of labcore's, a Policy class
    as the one that `scheduling_policy` names, an AdaptiveBudget class with (seconds, largest=tokens), the others without
    arguments. BlockTable and BeamSearch classes are called for each request, as labcore's. A budget needs
    max_num_batched_tokens="auto".
    Raises ValueError for a part that lacks a method, and for settings that the model, the device or the memory can't meet.
    """
    reject_unimplemented(config)
    for name, part, base in (
        ("block_pool", block_pool, BlockPool),
        ("block_table", block_table, BlockTable),
        ("kv_cache_manager", kv_cache_manager, KVCacheManager),
        ("scheduler", scheduler, Scheduler),
        ("prefix_cache", prefix_cache, PrefixCache),
        ("preemption", preemption, Preemption),
        ("chunking", chunking, ChunkPolicy),
        ("policy", policy, Policy),
        ("budget", budget, AdaptiveBudget),
        ("beam_search", beam_search, BeamSearch),
    ):
        check_part(name, part, base)
    for name, part in (
        ("block_table", block_table),
        ("kv_cache_manager", kv_cache_manager),
        ("scheduler", scheduler),
        ("beam_search", beam_search),
    ):
        if part is not None and not isinstance(part, type):
            raise ValueError(f"{name} is {part!r}; it must be a class: the engine makes its own instances.")
    if budget is not None and config.max_num_batched_tokens != "auto":
        raise ValueError(f'budget is given; max_num_batched_tokens must be "auto" then, it is {config.max_num_batched_tokens}.')
    backend.validate(loaded.layers, loaded.model.dtype, loaded.model.device)
    config, pool = resolve_pool(config, loaded, block_pool)
    tensors = KVCache(loaded.layers, pool.num_blocks, pool.block_size, loaded.model.dtype, loaded.model.device)
    cache = instantiate("prefix_cache", or_default(prefix_cache, default_prefix_cache(config)), pool.block_size)
    order = build_policy(config, policy)
    planner = or_default(scheduler, Scheduler)(
        or_default(kv_cache_manager, KVCacheManager)(pool, cache, or_default(block_table, BlockTable)),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_step_tokens,
        chunking=instantiate("chunking", or_default(chunking, default_chunking(config))),
        preemption=instantiate("preemption", or_default(preemption, Recompute)),
        policy=order,
    )
    recorder = build_recorder(config, loaded, pool, cache, order) if config.record else None
    runner = ModelRunner(loaded, tensors, backend)
    if config.cuda_graphs:
        check_graphs(backend, runner.device)
        runner.use_graphs(config.max_num_seqs, config.max_model_len)
    return Engine(
        config,
        loaded,
        planner,
        runner,
        recorder,
        build_budget(config, budget),
        beam_search=or_default(beam_search, BeamSearch),
    )


def resolve_pool(
    config: EngineConfig, loaded: LoadedModel, block_pool: BlockPool | type[BlockPool] | None
) -> tuple[EngineConfig, BlockPool]:
    """The block pool, and the config with `num_blocks`, `block_size` and `max_model_len` resolved."""
    longest = config.max_model_len or loaded.max_positions
    if longest > loaded.max_positions:
        raise ValueError(
            f"max_model_len is {longest:,}; it must be from 2 to {loaded.max_positions:,}, the positions of this model."
        )
    if block_pool is not None and not isinstance(block_pool, type):
        pool = block_pool
        if config.num_blocks not in (None, pool.num_blocks):
            raise ValueError(f"num_blocks is {config.num_blocks}; the block_pool given has {pool.num_blocks}.")
        if pool.num_free != pool.num_blocks:
            raise ValueError(f"block_pool has {pool.num_free} of {pool.num_blocks} blocks free; a new engine needs all.")
    else:
        per_block = bytes_per_block(loaded.layers, config.block_size, loaded.model.dtype.itemsize)
        num_blocks = config.num_blocks or pool_size(config, per_block, memory_budget(config, loaded.model), longest)
        check_memory(num_blocks, per_block, available_memory(loaded.model.device))
        pool = or_default(block_pool, BlockPool)(num_blocks, config.block_size)
    if config.max_model_len is None:
        longest = min(longest, pool.num_blocks * pool.block_size + 1)  # the last token needs no KV
    return replace(config, num_blocks=pool.num_blocks, block_size=pool.block_size, max_model_len=longest), pool


def check_part(name: str, part: object, base: type) -> None:
    """Raises ValueError for a part that lacks a public method of `base`. It need not be a subclass."""
    missing = [] if part is None else missing_methods(part, base)
    if missing:
        raise ValueError(f"{name} is {part!r}; it must be a {base.__name__} or have its methods: {', '.join(missing)} missing.")


def missing_methods(part: object, base: type) -> list[str]:
    """Public methods of `base` that a part lacks."""
    public = [name for name, value in vars(base).items() if callable(value) and not name.startswith("_")]
    return [name for name in public if not callable(getattr(part, name, None))]


def reject_unimplemented(config: EngineConfig) -> None:
    """Settings whose part is not implemented yet are rejected, never ignored."""
    if config.preemption_mode == "swap" or config.num_host_blocks:
        raise ValueError("preemption_mode 'swap' and num_host_blocks come with notebook 07; use 'recompute' and 0 for now.")
    if config.kv_cache_dtype != "auto":
        raise ValueError(f"kv_cache_dtype {config.kv_cache_dtype!r} comes with notebook 08; use 'auto' for now.")


def check_graphs(backend: AttentionBackend, device: torch.device) -> None:
    """Raises ValueError if no CUDA graph can be captured: without a GPU, or with the torch backend, which synchronises."""
    if device.type != "cuda" or isinstance(backend, TorchAttention):
        raise ValueError(
            f"cuda_graphs is True with {type(backend).__name__} on {device.type}; it needs the Triton backend on cuda."
        )


def build_policy(config: EngineConfig, policy: Policy | type[Policy] | None) -> Policy:
    """The scheduling policy of that name, or the given one; a class is called as the one of that name."""
    if config.scheduling_policy == "priority":
        return instantiate("policy", or_default(policy, PriorityWithAging), config.priority_aging_steps)
    return instantiate("policy", or_default(policy, FirstComeFirstServed))


def default_prefix_cache(config: EngineConfig) -> type[PrefixCache]:
    return HashedPrefixCache if config.enable_prefix_caching else NoPrefixCache


def default_chunking(config: EngineConfig) -> ChunkPolicy:
    if config.enable_chunked_prefill:
        return ChunkedPrefill(config.max_num_partial_prefills, config.long_prefill_token_threshold)
    return WholePrompts(config.max_num_seqs)


def build_budget(config: EngineConfig, budget: AdaptiveBudget | type[AdaptiveBudget] | None) -> AdaptiveBudget | None:
    """The adaptive token budget of max_num_batched_tokens="auto"; None if it is a number."""
    if config.max_num_batched_tokens != "auto":
        return None
    seconds, tokens = config.tbt_target_ms / 1000, config.max_step_tokens
    return instantiate("budget", or_default(budget, AdaptiveBudget), seconds, largest=tokens)


def build_recorder(
    config: EngineConfig, loaded: LoadedModel, pool: BlockPool, cache: PrefixCache, policy: Policy
) -> Recorder:
    """A flight recorder for this pool, prefix cache, policy and tokenizer."""
    return Recorder(
        pool.num_blocks,
        pool.block_size,
        num_host_blocks=config.num_host_blocks,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        hash_of=cache.hash_of,
        sort_key=policy.sort_key,
        decode=None if loaded.tokenizer is None else loaded.tokenizer.decode,
    )


def or_default(part: Part | None, default: Part) -> Part:
    """The part, or the default if it is None. Not `part or default`: an empty cache with a length of 0 is a part."""
    return default if part is None else part


def instantiate(name: str, part: Part | type[Part], *arguments: object, **keywords: object) -> Part:
    """A part as an instance: a class is called, an instance is used as it is. Raises ValueError if the call doesn't fit."""
    if not isinstance(part, type):
        return part
    try:
        return part(*arguments, **keywords)
    except TypeError as error:
        called = ", ".join([*map(repr, arguments), *(f"{key}={value!r}" for key, value in keywords.items())])
        raise ValueError(f"{name} is {part!r}; it must be a class that can be called with ({called}): {error}.") from error
