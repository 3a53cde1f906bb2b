"""What an attention backend does: put K and V where the slot mapping says, and attend over block tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from labcore.kvcache.tensors import KVCache


@dataclass
class AttentionMetadata:
    """Geometry of one step, shared by all layers. S sequences, T query tokens in all.

    slot_mapping       [T] int64     slot that each token's K and V go to; -1 is padding and writes nothing
    block_tables       [S, max_blocks] int32   rows padded with 0; never read beyond seq_lens
    seq_lens           [S] int32     tokens visible after this step
    cu_seqlens         [S + 1] int32 start of each sequence's queries in the flattened batch
    seq_lens_list, query_lens_list   the same on the host, so that nobody waits for the device
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
    """Attention over paged KV. All calls of one step pass the same metadata object."""

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
        """Causal attention of q, [T, num_query_heads, head_dim], over the tokens in the cache; returns q's shape.

        The K and V of the step's own tokens are in the cache already. scaling multiplies the scores; softcap squashes
        them to softcap * tanh(score / softcap); sliding_window lets a token see itself and window - 1 before it; sinks,
        [num_query_heads], is one more score per head that takes its share of the softmax and gives nothing.
        """

    @abstractmethod
    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in every layer. All sources are read before any destination is written."""
