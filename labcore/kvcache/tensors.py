"""The paged KV store: tensors for K and V, allocated once at start-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labcore.models.layers import LayerShape


class KVCache:
    """K and V of every layer, `[num_blocks, block_size, num_kv_heads, head_dim]` each.

    A token's row is contiguous, and so is a block: a block table's entry is one stretch of memory. Slot s of a layer is
    row s of `k[layer].flatten(0, 1)`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = list(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        shapes = [(num_blocks, block_size, layer.num_kv_heads, layer.head_dim) for layer in self.layers]
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block over all layers, K and V, in bytes."""
        return sum(t[0].numel() * t.element_size() for t in self.k + self.v)

    def fill(self, value: float, blocks: Sequence[int] | None = None) -> None:
        """Overwrite blocks (all of them when None) in every layer. Tests fill with NaN what no request may read."""
        index = slice(None) if blocks is None else list(blocks)
        for tensor in self.k + self.v:
            tensor[index] = value
