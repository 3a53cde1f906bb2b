"""The Triton backend: looks at a step's geometry, picks kernel, tile and number of splits, and launches.

    every sequence brings one query     paged_decode, in one piece or in splits that reduce_splits joins
    anything else                       paged_prefill: one launch for prompts, pieces of prompts and decodes together

Everything it decides, it decides from numbers that the host has already: no step waits for the device.
`choose_splits` is built in notebook 03.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from labcore.attention.backend import AttentionBackend, AttentionMetadata
from labcore.attention.kernels.launch import Launch, Scoring, copy_launch, decode_launches, prefill_launch, store_launch
from labcore.attention.kernels.tile_sizes import INTERPRETER, Tile, decode_tile, prefill_tile
from labcore.attention.kernels.triton_mode import INTERPRETED
from labcore.kvcache.tensors import KVCache

MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 256
"""A shorter split costs more to put together than it saves."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that a multiprocessor needs at work to keep its share of the memory bus busy."""


class TritonAttention(AttentionBackend):
    """Paged attention by the kernels of notebook 03, on an NVIDIA GPU or in Triton's interpreter.

    tile, splits   for experiments; None takes them from the table of tiles and from the step's geometry
    kernels        kernels of your own by their names, "paged_decode" say, that take the place of labcore's
    """

    def __init__(
        self, tile: Tile | None = None, splits: int | None = None, kernels: Mapping[str, object] | None = None
    ) -> None:
        self.tile = tile
        self.splits = splits
        self.kernels = dict(kernels or {})

    def store(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, meta: AttentionMetadata) -> None:
        check_device(k)
        self._run(store_launch(k, v, cache.k[layer], cache.v[layer], meta.slot_mapping))

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        meta: AttentionMetadata,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`. Raises ValueError where these kernels can't compute what is asked."""
        check_device(q)
        check_dtypes(q, cache.k[layer])
        pools = cache.k[layer], cache.v[layer]
        scoring = Scoring(scaling, sliding_window, softcap, sinks)
        num_kv_heads, head_dim = pools[0].shape[2:]
        group = q.shape[1] // num_kv_heads
        architecture, num_processors = device_facts(q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if is_decode(meta):
            tile = self.tile or decode_tile(architecture, head_dim, q.dtype, group)
            at_once = num_processors * PROGRAMS_PER_PROCESSOR
            splits = self.splits or choose_splits(meta.seq_lens_list, sliding_window, num_kv_heads, at_once)
            for launch in decode_launches(out, q, *pools, meta, scoring, tile, splits):
                self._run(launch)
        else:
            tile = self.tile or prefill_tile(architecture, head_dim, q.dtype)
            self._run(prefill_launch(out, q, *pools, meta, scoring, tile))
        return out

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """One launch for all pairs and layers of one shape.

        Programs run in any order, so pairs where one block is both read and written go through a copy of what is read.
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


def is_decode(meta: AttentionMetadata) -> bool:
    """One query for each sequence of the step."""
    return all(n == 1 for n in meta.query_lens_list)


def choose_splits(seq_lens: Sequence[int], window: int | None, num_kv_heads: int, at_once: int) -> int:
    """Into how many programs the keys of one sequence and KV head are cut: a power of two, 1 … MAX_SPLITS.

    So many that the longest sequence's programs work no longer than an even share of all the keys, if `at_once`
    programs share them. Many sequences of like length: 1. One of 32,768 tokens with 8 KV heads on 132 processors: 64.
    """
    visible = [n if window is None else min(n, window) for n in seq_lens]
    fair = max(sum(visible) * num_kv_heads / at_once, MIN_KEYS_PER_SPLIT)
    splits = 1
    while splits < MAX_SPLITS and max(visible) > splits * fair:
        splits *= 2
    return splits


def pools_by_shape(cache: KVCache) -> list[list[Tensor]]:
    """The cache's tensors, K and V of all layers, grouped by what one launch can serve together."""
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
    """Raises ValueError for dtypes that would be computed wrongly, or not at all."""
    if q.dtype != cache.dtype:
        raise ValueError(f"q is {q.dtype}, the KV cache {cache.dtype}: the Triton kernels need one dtype for both.")
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies the bit patterns of bfloat16, which gives nonsense: "
            "use float32 or float16 here, or attention_backend='torch'."
        )
