"""What the KV cache must know about one attention layer.

Plain data, no torch: the planner and the simulator size a cache from it without loading a model.

    bytes per token and layer  =  2 (K and V) x num_kv_heads x head_dim x bytes per element
    SmolLM2-135M, float32      =  2 x 3 x 64 x 4 = 1,536 B;  x 30 layers = 46,080 B
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """The shape of one attention layer, as seen by the cache and by the attention backend.

    `num_query_heads // num_kv_heads` query heads share each KV head (1: multi-head attention, more: grouped-query).
    `sliding_window` counts the tokens that a query sees, itself included; None: all of them.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
