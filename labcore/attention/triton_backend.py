"""The Triton backend: chooses kernel, tile and number of splits by the step's metadata, and launches.

    one query per sequence     paged_decode; with splits > 1 (Flash-Decoding), reduce_splits combines them
    any other step             paged_prefill: one launch for prefills, chunks and decodes together

All choices use lengths on the host: no step synchronises with the device. `choose_splits` is built in notebook 03.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from labcore.attention.backend import AttentionBackend, AttentionMetadata
from labcore.attention.kernels.launch import (
    KERNELS,
    Launch,
    ScoreOptions,
    check_rows,
    copy_launch,
    decode_launches,
    prefill_launch,
    store_launch,
)
from labcore.attention.kernels.tile_sizes import INTERPRETER, Tile, check_power_of_two, decode_tile, prefill_tile
from labcore.attention.kernels.triton_mode import INTERPRETED
from labcore.kvcache.tensors import KVCache
from labcore.models.layers import LayerShape

MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 256
"""A shorter split costs more to reduce than it saves."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs per multiprocessor that saturate the memory bandwidth."""


class TritonAttention(AttentionBackend):
    """Paged attention by Triton kernels, on an NVIDIA GPU or in Triton's interpreter.

    tile           for experiments; None takes it from the table of tiles
    splits         for experiments, a power of two from 1 to 64; None takes it from the step's geometry
    kernels        kernels of your own by their names, "paged_decode" say, that take the place of labcore's
    Raises ValueError for anything else.
    """

    def __init__(
        self, tile: Tile | None = None, splits: int | None = None, kernels: Mapping[str, object] | None = None
    ) -> None:
        if tile is not None and not isinstance(tile, Tile):
            raise ValueError(f"tile is {tile!r}; it must be a Tile, or None.")
        if splits is not None:
            check_power_of_two("splits", splits, 1, MAX_SPLITS, or_else=", or None")
        if kernels is not None:
            check_kernels(kernels)
        self.tile = tile
        self.splits = splits
        self.kernels = dict(kernels or {})

    def validate(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        sample = torch.empty(0, dtype=dtype, device=device)
        check_device(sample)
        check_dtypes(sample, sample)
        architecture, _ = device_facts(device)
        for layer in set(layers):
            group = layer.num_query_heads // layer.num_kv_heads
            check_rows(self.tile or decode_tile(architecture, layer.head_dim, dtype, group), group)

    def store(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        check_device(k)
        self._run(store_launch(k, v, cache.k[layer], cache.v[layer], metadata.slot_mapping))

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        metadata: AttentionMetadata,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`. Raises ValueError for unsupported devices, dtypes and head sizes."""
        check_device(q)
        check_dtypes(q, cache.k[layer])
        pools = cache.k[layer], cache.v[layer]
        score_options = ScoreOptions(scaling, sliding_window, softcap, sinks)
        num_kv_heads, head_dim = pools[0].shape[2:]
        group = q.shape[1] // num_kv_heads
        architecture, num_processors = device_facts(q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if is_decode(metadata):
            tile = self.tile or decode_tile(architecture, head_dim, q.dtype, group)
            max_programs = num_processors * PROGRAMS_PER_PROCESSOR
            splits = self.splits or choose_splits(metadata.seq_lens_list, sliding_window, num_kv_heads, max_programs)
            for launch in decode_launches(out, q, *pools, metadata, score_options, tile, splits):
                self._run(launch)
        else:
            tile = self.tile or prefill_tile(architecture, head_dim, q.dtype)
            self._run(prefill_launch(out, q, *pools, metadata, score_options, tile))
        return out

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """One launch for all pairs and all layers of one shape.

        Programs run in any order, so if a block is both source and destination, sources are first copied aside.
        """
        if not pairs:
            return
        table = torch.tensor(pairs, dtype=torch.int64).to(cache.k[0].device, non_blocking=True)
        src, dst = table.unbind(1)
        entangled = not {a for a, _ in pairs}.isdisjoint(b for _, b in pairs)
        for pools in pools_by_shape(cache):
            check_device(pools[0])
            if entangled:
                for pool in pools:
                    pool.index_copy_(0, dst, pool.index_select(0, src))
            else:
                self._run(copy_launch(pools, table))

    def _run(self, launch: Launch) -> None:
        replace(launch, kernel=self.kernels.get(launch.kernel.__name__, launch.kernel)).run()


def check_kernels(kernels: object) -> None:
    """Raises ValueError unless `kernels` maps names of labcore's kernels to what can be launched in their place."""
    if not isinstance(kernels, Mapping):
        raise ValueError(f"kernels is {kernels!r}; it must be a dictionary from a kernel's name to a kernel.")
    for name, kernel in kernels.items():
        if name not in KERNELS:
            raise ValueError(f"kernels has {name!r}; the kernels are {', '.join(KERNELS)}.")
        if not hasattr(kernel, "__getitem__"):
            raise ValueError(f"kernels[{name!r}] is {kernel!r}; it must be a kernel, a function under @triton.jit.")


def is_decode(metadata: AttentionMetadata) -> bool:
    """One query for each sequence of the step."""
    return all(n == 1 for n in metadata.query_lens_list)


def choose_splits(seq_lens: Sequence[int], window: int | None, num_kv_heads: int, max_programs: int) -> int:
    """Splits per sequence and KV head, a power of two from 1 to MAX_SPLITS (Flash-Decoding).

    The fewest splits at which no split has more keys than an even share of all keys over `max_programs` programs,
    or than MIN_KEYS_PER_SPLIT if that is larger. Many sequences of similar length: 1. One of 32,768 tokens with 8 KV
    heads on 132 processors: 64.
    """
    visible = [n if window is None else min(n, window) for n in seq_lens]
    target_keys = max(sum(visible) * num_kv_heads / max_programs, MIN_KEYS_PER_SPLIT)
    splits = 1
    while splits < MAX_SPLITS and max(visible) > splits * target_keys:
        splits *= 2
    return splits


def pools_by_shape(cache: KVCache) -> list[list[Tensor]]:
    """The cache's K and V tensors of all layers, grouped by shape, stride and dtype: one launch per group."""
    groups: dict[tuple, list[Tensor]] = {}
    for pool in cache.k + cache.v:
        groups.setdefault((pool.shape, pool.stride(), pool.dtype), []).append(pool)
    return list(groups.values())


@lru_cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """Architecture (compute capability 9.0 is 90) and number of multiprocessors; INTERPRETER and 1 without a GPU."""
    if INTERPRETED:
        return INTERPRETER, 1
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count


def check_device(tensor: Tensor) -> None:
    """Raises ValueError if this process can't run kernels on the tensor's device."""
    if not INTERPRETED and not tensor.is_cuda:
        raise ValueError(
            f"the Triton kernels are compiled for a GPU in this process and can't run on {tensor.device} tensors: "
            "use attention_backend='torch', or set TRITON_INTERPRET=1 before Python starts."
        )


def check_dtypes(q: Tensor, cache: Tensor) -> None:
    """Raises ValueError for dtypes that the kernels can't compute, or compute wrongly."""
    if q.dtype != cache.dtype:
        raise ValueError(f"q is {q.dtype}, the KV cache {cache.dtype}: the Triton kernels need one dtype for both.")
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies the bit patterns of bfloat16, which gives wrong results: "
            "use float32 or float16 here, or attention_backend='torch'."
        )
