"""An engine with no model: it plans, allocates and samples like a real one, and calls the recorder at the same points.

Tokens are made up, so a run of thousands of steps takes a moment. Used by the tests of the recorder and the pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

from labcore.kvcache.blocks import BlockPool, BlockTable, OutOfBlocks
from labcore.recorder import Recorder

Status = Enum("Status", "WAITING RUNNING SWAPPED FINISHED")


@dataclass(eq=False)
class ToyRequest:
    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    priority: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    status: Status = Status.WAITING
    table: BlockTable | None = None
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class ToyEngine:
    """First come, first served; a token budget; preempts the youngest by recompute, or swaps it if there is a host."""

    def __init__(
        self,
        num_blocks=12,
        block_size=4,
        budget=16,
        max_seqs=8,
        num_host_blocks=0,
        prefix_cache=False,
        record=True,
        **kw,
    ):
        self.pool = BlockPool(num_blocks, block_size)
        self.host = BlockPool(num_host_blocks, block_size) if num_host_blocks else None
        self.budget, self.max_seqs = budget, max_seqs
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.step_number = 0
        self.prefix_cache = prefix_cache
        self.hash_to_block: dict[int, int] = {}
        self.block_to_hash: dict[int, int] = {}
        self.recorder = None
        if record:
            self.recorder = Recorder(num_blocks, block_size, num_host_blocks=num_host_blocks, max_model_len=64, **kw)
            self.recorder.hash_of = self.block_to_hash.get

    def add(self, request_id, prompt, max_tokens=4, priority=0) -> ToyRequest:
        prompt = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
        request = ToyRequest(request_id, prompt, max_tokens, priority)
        self.waiting.append(request)
        if self.recorder:
            self.recorder.added(request)
        return request

    def fork(self, parent: ToyRequest, request_id: str) -> ToyRequest:
        child = ToyRequest(request_id, parent.prompt_token_ids, parent.max_tokens, parent.priority)
        child.output_token_ids = list(parent.output_token_ids)
        child.table, child.num_computed_tokens = parent.table.fork(), parent.num_computed_tokens
        child.status = Status.RUNNING
        self.running.append(child)
        if self.recorder:
            self.recorder.added(child)
        return child

    def abort(self, request: ToyRequest) -> None:
        self._finish(request, "abort")

    def run(self, max_steps=10_000) -> ToyEngine:
        while (self.waiting or self.running) and self.step_number < max_steps:
            self.step()
        return self

    def step(self) -> None:
        self.step_number += 1
        recorder = self.recorder
        if recorder:
            recorder.begin_step(self.step_number)
        plan, batch = self._plan()
        if recorder:
            recorder.scheduled(plan, batch)
        for request in batch:
            request.num_computed_tokens += plan.num_scheduled_tokens[request.request_id]
            self._register(request)
            if request.num_computed_tokens == request.num_tokens:
                token = 1000 + (request.num_tokens * 7919) % 997
                request.output_token_ids.append(token)
                if recorder:
                    recorder.sampled(request, token)
                if len(request.output_token_ids) >= request.max_tokens:
                    self._finish(request, "length")
        if recorder:
            recorder.end_step(self.pool)

    def _plan(self):
        plan = SimpleNamespace(
            step=self.step_number, num_scheduled_tokens={}, block_copies=[], swaps_in=[], swaps_out=[], preempted=[]
        )
        batch, budget = [], self.budget
        for request in list(self.running):
            while request in self.running and budget:
                try:
                    count = min(budget, request.num_tokens - request.num_computed_tokens)
                    if copy := request.table.copy_on_write():
                        plan.block_copies.append(copy)
                        self._forget(copy[1])
                    self._grow(request, count)
                except OutOfBlocks:
                    self._preempt(self.running[-1], plan)
                    continue
                plan.num_scheduled_tokens[request.request_id] = count
                batch.append(request)
                budget -= count
                break
        while self.waiting and budget and len(self.running) < self.max_seqs and not plan.preempted:
            request = self.waiting[0]
            try:
                if request.status is Status.SWAPPED:
                    self._swap_in(request, plan)
                else:
                    request.table = BlockTable(self.pool)
                    self._reuse_prefix(request)
                count = min(budget, request.num_tokens - request.num_computed_tokens)
                self._grow(request, count)
            except OutOfBlocks:
                if request.status is not Status.SWAPPED:
                    request.table.free()
                    request.num_computed_tokens = 0
                break
            self.waiting.pop(0)
            request.status = Status.RUNNING
            self.running.append(request)
            plan.num_scheduled_tokens[request.request_id] = count
            batch.append(request)
            budget -= count
        batch = [request for request in batch if request.status is Status.RUNNING]
        plan.num_scheduled_tokens = {r.request_id: plan.num_scheduled_tokens[r.request_id] for r in batch}
        return plan, batch

    def _grow(self, request: ToyRequest, count: int) -> None:
        known = len(request.table.blocks)
        request.table.append(request.num_computed_tokens + count - request.table.num_tokens)
        for block in request.table.blocks[known:]:
            self._forget(block)

    def _preempt(self, request: ToyRequest, plan) -> None:
        self.running.remove(request)
        self.waiting.insert(0, request)
        plan.preempted.append(request.request_id)
        blocks = request.table.blocks
        if self.host and self.host.num_free >= len(blocks):
            request.status = Status.SWAPPED
            table = BlockTable(self.host)
            table.append(request.table.num_tokens)
            plan.swaps_out += list(zip(blocks, table.blocks, strict=True))
            request.table.free()
            request.table = table
        else:
            request.status = Status.WAITING
            request.table.free()
            request.num_computed_tokens = 0

    def _swap_in(self, request: ToyRequest, plan) -> None:
        if self.pool.num_free < -(-request.num_tokens // self.pool.block_size):
            raise OutOfBlocks
        table = BlockTable(self.pool)
        table.append(request.table.num_tokens)
        plan.swaps_in += list(zip(request.table.blocks, table.blocks, strict=True))
        for block in table.blocks:
            self._forget(block)
        request.table.free()
        request.table = table

    def _reuse_prefix(self, request: ToyRequest) -> None:
        request.num_cached_tokens = 0
        if not self.prefix_cache:
            return
        tokens, size = request.prompt_token_ids + request.output_token_ids, self.pool.block_size
        for stop in range(size, len(tokens), size):
            block = self.hash_to_block.get(hash(tuple(tokens[:stop])))
            if block is None:
                break
            self.pool.incref([block])
            request.table.blocks.append(block)
            request.table.num_tokens += size
        request.num_computed_tokens = request.num_cached_tokens = request.table.num_tokens

    def _register(self, request: ToyRequest) -> None:
        tokens, size = request.prompt_token_ids + request.output_token_ids, self.pool.block_size
        for index in range(request.num_computed_tokens // size if self.prefix_cache else 0):
            digest, block = hash(tuple(tokens[: (index + 1) * size])), request.table.blocks[index]
            if digest not in self.hash_to_block and block not in self.block_to_hash:
                self.hash_to_block[digest], self.block_to_hash[block] = block, digest

    def _forget(self, block: int) -> None:
        digest = self.block_to_hash.pop(block, None)
        self.hash_to_block.pop(digest, None)

    def _finish(self, request: ToyRequest, reason: str) -> None:
        request.finish_reason, request.status = reason, Status.FINISHED
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if request.table is not None:
            request.table.free()
        if self.recorder:
            self.recorder.finished(request)
