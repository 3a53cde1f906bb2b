"""Tile sizes and launch options of the kernels: a table by GPU generation and head size, with the reason of each row.

No autotuning: the first step doesn't wait for a search, and equal steps run equal code. `labcore.attention.offline_compile`
compiles every row for every target without a GPU; a test checks that no registers spill and that shared memory fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

INTERPRETER = 0
"""Stands for Triton's interpreter in place of a GPU architecture."""


def check_power_of_two(name: str, value: object, low: int, high: int, or_else: str = "") -> None:
    """Raises ValueError that names the field and its range, unless value is a power of two from low to high."""
    if type(value) is not int or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name} is {value!r}; it must be a power of two from {low} to {high}{or_else}.")


@dataclass(frozen=True)
class Tile:
    """A tile of rows × keys scores, computed by `warps` warps with `stages` software pipeline stages (Triton's num_stages).

    A load of K or V depends on a load of block ids, which takes a stage of its own: 3 stages prefetch one tile of K
    and V, 5 stages two. Raises ValueError for sizes that no kernel can have: tensor cores take keys by 16.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        check_power_of_two("rows", self.rows, 1, 256)
        check_power_of_two("keys", self.keys, 16, 256)
        check_power_of_two("warps", self.warps, 1, 32)
        if type(self.stages) is not int or self.stages < 1:
            raise ValueError(f"stages is {self.stages!r}; it must be a whole number of at least 1.")


@dataclass(frozen=True)
class TileRow:
    """A row of a table: tensor cores or not, architectures from `oldest` up, head sizes up to `max_head_dim`."""

    tensor_cores: bool
    oldest: int
    max_head_dim: int
    tile: Tile
    why: str


DECODE = (
    TileRow(True, 90, 128, Tile(16, 64, 4, 5), "two tiles of 2 × 16 KB ahead saturate HBM3; 3 programs fit in 228 KB"),
    TileRow(True, 90, 256, Tile(16, 32, 4, 5), "half the keys at twice the head size: the same bytes ahead"),
    TileRow(True, 80, 128, Tile(16, 64, 4, 3), "one tile ahead: 2 programs fit in the 100 KB of sm_86 and sm_89"),
    TileRow(True, 80, 256, Tile(16, 32, 4, 3), "half the keys at twice the head size: the same bytes ahead"),
    TileRow(False, 75, 64, Tile(16, 32, 4, 3), "multiply-adds keep scores and operands in registers: half the keys"),
    TileRow(False, 75, 256, Tile(16, 16, 4, 3), "and a quarter from head size 80 up, or registers spill"),
)
"""Decode tiles. Rows are the query heads of one KV head: see `decode_tile`."""

PREFILL = (
    TileRow(True, 80, 64, Tile(128, 64, 8, 3), "a key is used 128 times: compute-bound; fits sm_86"),
    TileRow(True, 90, 128, Tile(128, 64, 8, 3), "wgmma takes operands from shared memory: room for 64 keys in registers"),
    TileRow(True, 80, 128, Tile(128, 32, 8, 3), "mma takes operands from registers: with 64 keys they would spill"),
    TileRow(True, 80, 256, Tile(64, 32, 8, 3), "the output alone is 64 × 256 float32, 64 registers a thread"),
    TileRow(False, 75, 64, Tile(32, 16, 4, 3), "multiply-adds: the largest tile without spills"),
    TileRow(False, 75, 128, Tile(32, 16, 8, 3), "twice the head size on twice the warps: no spills"),
    TileRow(False, 75, 256, Tile(16, 16, 8, 3), "half the rows: the output alone is 16 × 256 float32"),
)
"""Prefill tiles. Rows are pairs of token and query head."""

INTERPRETED = Tile(16, 64, 4, 1)
"""The interpreter takes the same time for a tile of any size, so its tiles are large."""


def decode_tile(architecture: int, head_dim: int, dtype: torch.dtype, group: int) -> Tile:
    """Decode tile with `group` query heads per KV head.

    Rows are the next power of two of `group`, at least 16 on tensor cores. From 32 rows up the warps are doubled.
    Raises ValueError for a GPU or a head size outside the table.
    """
    rows = 1 << (group - 1).bit_length()
    if architecture == INTERPRETER:
        return replace(INTERPRETED, rows=max(16, rows))
    row = lookup(DECODE, architecture, head_dim, dtype)
    rows = max(16, rows) if row.tensor_cores else rows
    return replace(row.tile, rows=rows, warps=row.tile.warps if rows <= 16 else 2 * row.tile.warps)


def prefill_tile(architecture: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Prefill tile. Raises ValueError for a GPU or a head size outside the table."""
    if architecture == INTERPRETER:
        return replace(INTERPRETED, rows=64)
    return lookup(PREFILL, architecture, head_dim, dtype).tile


def lookup(table: Sequence[TileRow], architecture: int, head_dim: int, dtype: torch.dtype) -> TileRow:
    """The first matching row.

    float32 never uses tensor cores, which would round operands to TF32, with 10 bits of mantissa. On Turing (sm_75)
    Triton emits no tensor-core instructions for any dtype.
    """
    tensor_cores = architecture >= 80 and dtype.itemsize == 2
    for row in table:
        if row.tensor_cores == tensor_cores and architecture >= row.oldest and head_dim <= row.max_head_dim:
            return row
    raise ValueError(
        f"no Triton kernel for head size {head_dim} on sm_{architecture}: they go up to 256, from sm_75 on — "
        "use attention_backend='torch'."
    )
