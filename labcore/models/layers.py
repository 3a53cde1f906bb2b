"""The shape of an attention layer, from which KV cache size follows.

Plain data, no torch: planner and simulator size a cache without loading a model.

    bytes per token and layer  =  2 (K and V) x num_kv_heads x head_dim x bytes per element
    SmolLM2-135M, float32      =  2 x 3 x 64 x 4 = 1,536 B;  x 30 layers = 46,080 B
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """The shape of one attention layer.

    `num_query_heads // num_kv_heads` query heads share each KV head (1: multi-head attention, more: grouped-query).
    `sliding_window` is the number of tokens that a query sees, itself included; None: all.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
