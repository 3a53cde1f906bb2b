"""Kernel launches as data: kernel, grid, arguments.

A `Launch` can be run, or compiled without a GPU: the compile gate builds the launches that a GPU would run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.attention.backend import AttentionMetadata
from labcore.attention.kernels.copy import copy_blocks
from labcore.attention.kernels.decode import paged_decode, reduce_splits
from labcore.attention.kernels.prefill import paged_prefill
from labcore.attention.kernels.store import store_kv
from labcore.attention.kernels.tile_sizes import Tile
from labcore.attention.kernels.triton_mode import triton

KERNELS = ("store_kv", "paged_decode", "reduce_splits", "paged_prefill", "copy_blocks")
"""Names of the kernels that a launch may call."""

PIECE = 2048
"""Elements per program of a block copy: in 16 bits, 128 threads with two 16-byte loads each."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch. args by the kernel's parameter names; constexprs in capitals."""

    kernel: object
    grid: tuple[int, ...]
    args: dict[str, object]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        self.kernel[self.grid](**self.args, num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(frozen=True)
class ScoreOptions:
    """A layer's score options: see `AttentionBackend.attend`."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def store_launch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> Launch:
    """Write k and v, [T, Hkv, D], to the slots of slot_mapping."""
    num_tokens, num_heads, head_dim = k.shape
    args = dict(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_strides=k.stride(),
        v_strides=v.stride(),
        kv_strides=k_cache.stride(),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        HEADS=triton.next_power_of_2(num_heads),
        DIMS=triton.next_power_of_2(head_dim),
    )
    return Launch(store_kv, (num_tokens,), args)


def decode_launches(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    score_options: ScoreOptions,
    tile: Tile,
    splits: int = 1,
) -> list[Launch]:
    """Decode attention, q and out [S, Hq, D]; if `splits`, a power of two, is above 1, a second launch reduces them."""
    num_seqs, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[2]
    check_rows(tile, group)
    partial, log_totals = out.unsqueeze(2), None
    if splits > 1:
        partial = torch.empty(num_seqs, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        log_totals = torch.empty(num_seqs, num_heads, splits, dtype=torch.float32, device=q.device)
    args = dict(
        out=partial,
        log_totals=log_totals,
        out_strides=partial.stride(),
        **attention_args(q, k_cache, v_cache, metadata, score_options, tile),
    )
    launch = Launch(paged_decode, (num_seqs, k_cache.shape[2], splits), args, tile.warps, tile.stages)
    if splits == 1:
        return [launch]
    args = dict(
        out=out,
        partial=partial,
        log_totals=log_totals,
        out_strides=out.stride(),
        partial_strides=partial.stride(),
        HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim),
        SPLITS=splits,
    )
    return [launch, Launch(reduce_splits, (num_seqs, num_heads), args)]


def check_rows(tile: Tile, group: int) -> None:
    """Raises ValueError for a decode tile with fewer rows than `group`, the query heads of one KV head."""
    if group > tile.rows:
        raise ValueError(f"a tile of {tile.rows} rows is too small for {group} query heads per KV head.")


def prefill_launch(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    score_options: ScoreOptions,
    tile: Tile,
) -> Launch:
    """Attention of a mixed batch, q and out [T, Hq, D]."""
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, num_seqs = k_cache.shape[2], metadata.seq_lens.shape[0]
    args = dict(
        out=out,
        cu_seqlens=metadata.cu_seqlens,
        num_seqs=num_seqs,
        out_strides=out.stride(),
        **attention_args(q, k_cache, v_cache, metadata, score_options, tile),
    )
    tiles = num_tokens * (num_heads // num_kv_heads) // tile.rows + num_seqs
    return Launch(paged_prefill, (tiles, num_kv_heads), args, tile.warps, tile.stages)


def attention_args(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, score_options: ScoreOptions, tile: Tile
) -> dict[str, object]:
    """The arguments that decode and prefill share."""
    head_dim = q.shape[2]
    return dict(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=metadata.block_tables,
        seq_lens=metadata.seq_lens,
        sinks=score_options.sinks,
        scale=float(score_options.scaling),
        q_strides=q.stride(),
        kv_strides=k_cache.stride(),
        table_stride=metadata.block_tables.stride(0),
        HEAD_DIM=head_dim,
        GROUP=q.shape[1] // k_cache.shape[2],
        BLOCK_SIZE=k_cache.shape[1],
        WINDOW=score_options.sliding_window,
        SOFTCAP=score_options.softcap,
        ROWS=tile.rows,
        DIMS=triton.next_power_of_2(head_dim),
        TILE=tile.keys,
    )


def copy_launch(pools: Sequence[Tensor], pairs: Tensor) -> Launch:
    """Copy blocks, pairs [n, 2] int64 of (src, dst), in pools of one shape, layout and dtype.

    Raises ValueError if the distances between pools aren't multiples of 16 elements.
    """
    first = pools[0]
    _, block_size, num_heads, head_dim = first.shape
    distances = [(pool.data_ptr() - first.data_ptr()) // first.element_size() for pool in pools]
    if any(distance % 16 for distance in distances):
        raise ValueError("the pools of one launch must lie a multiple of 16 elements apart in memory.")
    args = dict(
        first_pool=first,
        distances=torch.tensor(distances, dtype=torch.int64).to(first.device, non_blocking=True),
        pairs=pairs,
        kv_strides=first.stride(),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PIECE=PIECE,
    )
    pieces = triton.cdiv(block_size * num_heads * head_dim, PIECE)
    return Launch(copy_blocks, (pairs.shape[0], len(pools), pieces), args)
