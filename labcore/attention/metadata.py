"""One flattened batch: whose tokens they are, where their KV goes, and what each of them may look at.

Three sequences in one step, block size 4; ana decodes, bo is in the middle of his prompt, cy starts:

    tokens          a9 │ b4 b5 b6 │ c0 c1          T = 6 query tokens, no padding between them
    cu_seqlens     [0,   1,         4,     6]
    seq_lens       [10,  7,         2]             visible after this step, history and new tokens together
    slot_mapping   [29, 44, 45, 46, 12, 13]        block * block_size + offset, from the block tables
    block_tables   [[1, 5, 7], [9, 11, 0], [3, 0, 0]]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
