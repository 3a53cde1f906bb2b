"""The model runner: turns a plan into one forward pass. The only place where token ids become tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from labcore.attention.backend import AttentionBackend, AttentionMetadata
from labcore.attention.transformers_hook import ATTENTION_NAME, PagedStep, register
from labcore.engine.cuda_graphs import Capture, DecodeGraphs
from labcore.kvcache.tensors import KVCache
from labcore.models import LoadedModel
from labcore.models.view import view_of
from labcore.request import Request
from labcore.scheduler.plan import SchedulerOutput


class ModelRunner:
    """Runs a decoder of transformers on a flattened batch, with its attention paged.

    model     a view of the decoder whose attention is labcore's; other users of its weights are not affected
    cache     KV store of all layers
    backend   writes to the store and attends over it
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, backend: AttentionBackend) -> None:
        register()
        self.model = view_of(loaded.model)
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.cache = cache
        self.backend = backend
        self.device = cache.k[0].device
        self.graphs: DecodeGraphs | None = None

    def use_graphs(self, max_num_seqs: int, max_model_len: int, capture: Capture | None = None) -> None:
        """Serve decode steps from CUDA graphs from now on. Needs the Triton backend; see `labcore.engine.cuda_graphs`."""
        self.graphs = DecodeGraphs(
            self._forward,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_blocks=-(-max_model_len // self.cache.block_size),
            block_size=self.cache.block_size,
            device=self.device,
            capture=capture,
        )

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> tuple[list[Request], Tensor]:
        """Compute the plan's tokens, and leave their KV in the cache.

        Returns the requests that sample a token now, and a row of logits for each, [S, vocabulary], float32: those that
        have caught up, in batch order, each followed by its `plan.siblings`. A request in mid-prompt gets no row.
        """
        self.backend.copy_blocks(self.cache, plan.block_copies)
        batch = [(requests[request_id], n) for request_id, n in plan.num_scheduled_tokens.items()]
        input_ids, positions, metadata = self._flatten(batch)
        last = metadata.cu_seqlens[1:].long() - 1
        caught_up = [i for i, (request, n) in enumerate(batch) if n == request.num_uncomputed_tokens]
        complete = len(caught_up) == len(batch)
        if self.graphs is not None and complete and self.graphs.serves(metadata):
            logits = self.graphs.run(input_ids, positions, metadata)[0].float()
        else:
            keep = last if complete else last[caught_up or [0]]  # a model must be asked for one row at least
            logits = self._forward(input_ids, positions, metadata, keep)[0, : len(caught_up)].float()
        sampling = [batch[i][0] for i in caught_up]
        if not plan.siblings:
            return sampling, logits
        families = [[request.request_id, *plan.siblings.get(request.request_id, ())] for request in sampling]
        rows = [row for row, family in enumerate(families) for _ in family]
        return [requests[request_id] for family in families for request_id in family], logits[rows]

    def _forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, keep: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=keep,
            paged_step=PagedStep(self.backend, self.cache, metadata),
        ).logits

    def _flatten(self, batch: list[tuple[Request, int]]) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Lay the scheduled tokens of all requests end to end: ids [T], positions [T], and the geometry of the step."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends, seq_lens, query_lens = [0], [], []
        for request, n in batch:
            start = request.num_computed_tokens
            ids += request.token_ids(start, start + n)
            positions += range(start, start + n)
            slots += request.table.slot_mapping(start, start + n)
            ends.append(len(ids))
            seq_lens.append(start + n)
            query_lens.append(n)
        widest = max(len(request.table.blocks) for request, _ in batch)
        tables = [request.table.blocks + [0] * (widest - len(request.table.blocks)) for request, _ in batch]
        metadata = AttentionMetadata(
            slot_mapping=self._tensor(slots, torch.int64),
            block_tables=self._tensor(tables, torch.int32),
            seq_lens=self._tensor(seq_lens, torch.int32),
            cu_seqlens=self._tensor(ends, torch.int32),
            block_size=self.cache.block_size,
            seq_lens_list=seq_lens,
            query_lens_list=query_lens,
        )
        return self._tensor(ids, torch.int64), self._tensor(positions, torch.int64), metadata

    def _tensor(self, values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)
