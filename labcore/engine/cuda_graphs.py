"""Decode steps as CUDA graphs: the hundreds of launches of a step recorded once, and played back by one call.

A small model's decode step is bound by the host, which launches kernels one after the other. A graph plays them back
without it, but always the same kernels on the same memory. So a graph is captured for each of a few batch sizes, over
buffers that stay where they are; a step copies its inputs there, padded to the next bucket:

    3 requests, bucket 4        input_ids    [a, b, c, 0]
                                seq_lens     [9, 4, 7, 0]      length 0: the kernels look at nothing
                                slot_mapping [s, t, u, -1]     slot -1: the kernels write nothing

What a graph can't change is the number of splits per sequence; the kernels work out on the device which keys each split
takes. Source: vLLM's and nano-vllm's decode graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.attention.backend import AttentionMetadata

Forward = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]
"""(input_ids [T], positions [T], geometry, rows to keep [S]) → logits [1, S, vocabulary]; see `ModelRunner`."""

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""A function to capture → a function that plays it back, and the tensor in which its result appears."""


class CudaGraphCapture:
    """Captures on the current device. All graphs share one memory pool, since no two ever run at once."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        run()  # kernels are compiled and libraries make their workspaces on the first call, which can't be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = run()
        return graph.replay, out


@dataclass
class Bucket:
    """A captured step of one batch size."""

    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Serves decode steps of up to `max_num_seqs` requests from graphs, captured when a bucket is first needed.

    forward         one forward pass of the model
    max_blocks      width of the block tables: blocks of the longest sequence
    max_model_len   its tokens
    capture         how a step is recorded; tests hand in one that works without a GPU
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_num_seqs: int,
        max_blocks: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.forward = forward
        self.sizes = bucket_sizes(max_num_seqs)
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.capture = capture or CudaGraphCapture()
        self.buckets: dict[int, Bucket] = {}
        largest = self.sizes[-1]
        self.input_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self.positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(largest, max_blocks, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(largest, dtype=torch.int32, device=device)
        self.cu_seqlens = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self.rows = torch.arange(largest, dtype=torch.int64, device=device)

    def serves(self, metadata: AttentionMetadata) -> bool:
        """True for a step in which every sequence brings one query, if a bucket is large enough."""
        lens = metadata.query_lens_list
        return len(lens) <= self.sizes[-1] and all(n == 1 for n in lens)

    def run(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Logits of a decode step of n requests, [1, n, vocabulary]. They are overwritten by the next step."""
        n = len(metadata.query_lens_list)
        size = next(size for size in self.sizes if size >= n)
        self._fill(n, size, input_ids, positions, metadata)
        if size not in self.buckets:
            self.buckets[size] = Bucket(*self.capture(lambda: self._forward(size)))
        bucket = self.buckets[size]
        bucket.replay()
        return bucket.logits[:, :n]

    def _fill(self, n: int, size: int, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> None:
        self.input_ids[:n] = input_ids
        self.positions[:n] = positions
        self.slot_mapping[:n] = metadata.slot_mapping
        self.block_tables[:n, : metadata.block_tables.shape[1]] = metadata.block_tables
        self.seq_lens[:n] = metadata.seq_lens
        self.slot_mapping[n:size] = -1
        self.seq_lens[n:size] = 0

    def _forward(self, size: int) -> Tensor:
        """The forward pass over the buffers. The lengths on the host, as long as they may get, choose the splits."""
        metadata = AttentionMetadata(
            slot_mapping=self.slot_mapping[:size],
            block_tables=self.block_tables[:size],
            seq_lens=self.seq_lens[:size],
            cu_seqlens=self.cu_seqlens[: size + 1],
            block_size=self.block_size,
            seq_lens_list=[self.max_model_len] * size,
            query_lens_list=[1] * size,
        )
        return self.forward(self.input_ids[:size], self.positions[:size], metadata, self.rows[:size])


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every multiple of 8, up to `max_num_seqs` rounded up: at most 7 rows of padding."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs]
