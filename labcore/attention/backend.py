"""The attention backend interface: write K and V by slot mapping, attend over block tables, copy blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.kvcache.tensors import KVCache
from labcore.models.layers import LayerShape


@dataclass
class AttentionMetadata:
    """Attention metadata of one step, shared by all layers. S sequences, T query tokens in total.

    slot_mapping       [T] int64     slot of each token's K and V; -1 is padding and writes nothing
    block_tables       [S, max_blocks] int32   rows padded with 0; never read beyond seq_lens
    seq_lens           [S] int32     tokens of each sequence in the cache, this step's included
    cu_seqlens         [S + 1] int32 start of each sequence's queries in the flattened batch
    seq_lens_list, query_lens_list   the lengths on the host, to avoid device synchronisation
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    block_size: int
    seq_lens_list: list[int]
    query_lens_list: list[int]

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens_list)


class AttentionBackend(ABC):
    """Attention over a paged KV cache. All calls of one step pass the same metadata object."""

    def validate(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:  # noqa: B027
        """Raises ValueError for a model that this backend can't serve. Called once, when an engine is made."""

    @abstractmethod
    def store(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        """Write k and v, [T, num_kv_heads, head_dim], to the slots of `metadata.slot_mapping`; -1 writes nothing."""

    @abstractmethod
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
        """Causal attention of q, [T, num_query_heads, head_dim], over the cache; returns q's shape.

        The step's own K and V are already in the cache.
        scaling          factor of the scores
        sliding_window   tokens that a query sees, itself included; None: all
        softcap          scores become softcap * tanh(score / softcap)
        sinks            [num_query_heads], one more logit per head in the softmax, with a V of 0 (attention sinks)
        """

    @abstractmethod
    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in every layer. All sources are read before any destination is written."""
