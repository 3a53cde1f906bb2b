"""The engine: schedule, run, update, and nothing else.

         ┌────────────── step() ───────────────────────────────────────────┐
    add ─┼→ scheduler ──plan──→ runner ──logits──→ sampler ──tokens──→ outputs ─┼→ one RequestOutput a request
         └──────↑────────────────────────────────────────── finished ──────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from labcore.blocks import BlockPool
from labcore.config import EngineConfig
from labcore.detokenize import Detokenizer
from labcore.gate import Gate
from labcore.integrity import check_integrity
from labcore.models import LoadedModel
from labcore.output_processor import Completion, CompletionGroup
from labcore.outputs import RequestOutput
from labcore.recorder import Recorder
from labcore.request import Request, RequestStatus
from labcore.runner import ModelRunner
from labcore.sampling import SampledToken, Sampler
from labcore.sampling_params import SamplingParams
from labcore.scheduler import Scheduler, SchedulerOutput

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Spreads the seeds of requests that bring none over all 64 bits (golden ratio, as in splitmix64)."""


class Engine:
    """Serves many requests at once, one step at a time.

    config      its settings; `max_model_len` and `num_blocks` are resolved to numbers
    loaded      model and tokenizer
    scheduler   plans steps, owns the queues and the block pool
    runner      computes them
    recorder    keeps the flight record, or None
    clock       seconds, for metrics only; no decision depends on it
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        scheduler: Scheduler,
        runner: ModelRunner,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.scheduler = scheduler
        self.runner = runner
        self.recorder = recorder
        self.sampler = Sampler(loaded.eos_token_ids)
        self.gate = Gate(config, loaded, scheduler.pool)
        self._clock = clock
        self._arrivals = 0
        self._groups: dict[str, CompletionGroup] = {}
        self._requests: dict[str, Request] = {}
        self._completions: dict[str, Completion] = {}
        self._owners: dict[str, CompletionGroup] = {}

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        *,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> None:
        """Queue a request. It joins the next step that has room for it.

        priority       matters under scheduling_policy="priority"; a smaller number goes first
        arrival_time   seconds on the engine's clock; None is now. For metrics only
        cache_salt     its prefix is shared only with requests of the same salt: one a tenant keeps tenants apart
        use_prefix_cache   False computes every token, and leaves nothing for others to find
        Raises ValueError, and queues nothing, for an id in use, an empty or too long prompt, a token id outside the
        vocabulary, and a request that the pool could never hold.
        """
        params = SamplingParams() if params is None else params
        prompt = self.check_request(request_id, prompt_token_ids, params, priority, arrival_time)
        max_tokens = self.gate.output_limit(len(prompt), params)
        arrival_time = self._clock() if arrival_time is None else float(arrival_time)
        completions = [
            Completion(
                k,
                Request(
                    request_id=name,
                    prompt_token_ids=prompt,
                    params=params,
                    arrival=self._arrivals + k,
                    max_tokens=max_tokens,
                    seed=self._seed(params, k),
                    priority=int(priority),
                    arrival_time=arrival_time,
                    cache_salt=cache_salt,
                    use_prefix_cache=use_prefix_cache,
                ),
                Detokenizer(self.loaded.tokenizer, prompt, params),
            )
            for k, name in enumerate(sequence_ids(request_id, params))
        ]
        self._arrivals += params.n
        group = self._groups[request_id] = CompletionGroup(request_id, completions)
        for completion in completions:
            request = completion.request
            self._requests[request.request_id] = request
            self._completions[request.request_id] = completion
            self._owners[request.request_id] = group
            if self.recorder is not None:
                self.recorder.added(request)
        leader, *followers = group.requests
        self.scheduler.add(leader, followers)

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return an output for each request that gained a token in it.

        If anything goes wrong while the model runs, the requests in the step keep their tokens, lose the KV that may be
        half written, and are computed again by later steps.
        """
        if not self.has_unfinished_requests():
            return []
        if self.recorder is not None:
            self.recorder.begin_step()
        plan = self.scheduler.schedule()
        self._note_scheduled(plan)
        try:
            requests, logits = self._with_followers(*self.runner.run(plan, self._requests))
            tokens = self.sampler(logits, requests) if requests else []
        except BaseException:
            self.scheduler.roll_back([self._requests[i] for i in plan.num_scheduled_tokens])
            if self.recorder is not None:
                self.recorder.end_step(self.pool)
            raise
        return self._update(plan, requests, tokens)

    def request_ids(self) -> list[str]:
        """Ids of the requests that are being served, in order of arrival."""
        return list(self._groups)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def abort(self, request_id: str) -> RequestOutput:
        """End a request, whatever it is doing, and return what it has so far, with finish_reason "abort".

        Raises ValueError for an id that is not (or no longer) being served.
        """
        group = self._groups.get(request_id)
        if group is None:
            raise ValueError(f"request_id {request_id!r} is not being served; {len(self._groups)} requests are.")
        for completion in group.completions:
            if completion.output.finish_reason is None:
                completion.request.metrics.finished_time = self._clock()
                completion.finish("abort")
                self._retire(completion.request)
        self._close(group)
        return group.output()

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters by the names of the contract; kv_cache_usage is the share of blocks in use, 0 … 1."""
        pool, scheduler = self.pool, self.scheduler
        waiting = [*scheduler.waiting, *scheduler.followers.values()]
        num_swapped = sum(request.status is RequestStatus.SWAPPED for request in waiting)
        return {
            "num_running": len(scheduler.running),
            "num_waiting": len(waiting) - num_swapped,
            "num_swapped": num_swapped,
            "num_free_blocks": pool.num_free,
            "num_total_blocks": pool.num_blocks,
            "num_preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": scheduler.prefix_cache_queries,
            "prefix_cache_hits": scheduler.prefix_cache_hits,
            "kv_cache_usage": 1 - pool.num_free / pool.num_blocks,
        }

    def check_integrity(self) -> None:
        """Recompute refcounts, free list and request states from scratch; raises IntegrityError on any mismatch."""
        check_integrity(self.scheduler, self._requests.values())

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> list[int]:
        """The prompt as a list of ints, if the request can be served; raises ValueError if not. Changes nothing."""
        prompt = self.gate.check(request_id, prompt_token_ids, params, priority, arrival_time)
        names = {request_id, *sequence_ids(request_id, params)}
        if taken := sorted(names & (self._groups.keys() | self._requests.keys())):
            raise ValueError(f"request_id {taken[0]!r} is in use; give each unfinished request an id of its own.")
        return prompt

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is not None:
            return params.seed + index
        return (self.config.seed + (self._arrivals + index + 1) * SEED_STRIDE) % 2**63

    def _note_scheduled(self, plan: SchedulerOutput) -> None:
        now = self._clock()
        for request_id in plan.num_scheduled_tokens:
            metrics = self._requests[request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
        if self.recorder is not None:
            self.recorder.scheduled(plan, [self._requests[i] for i in plan.num_scheduled_tokens])

    def _with_followers(self, requests: list[Request], logits: Tensor) -> tuple[list[Request], Tensor]:
        """A follower draws its first token from the very logits of its leader: [S, V] → [S + followers, V]."""
        if not self.scheduler.followers:
            return requests, logits
        rows, everyone = [], []
        for row, request in enumerate(requests):
            group = self._owners[request.request_id].requests if not request.output_token_ids else [request]
            everyone += group
            rows += [row] * len(group)
        return everyone, logits[rows]

    def _update(
        self, plan: SchedulerOutput, requests: list[Request], tokens: list[SampledToken]
    ) -> list[RequestOutput]:
        now = self._clock()
        for request_id, n in plan.num_scheduled_tokens.items():
            self.scheduler.computed(self._requests[request_id], n)
        for request in requests:  # before any of them can end, and give back the blocks that are to be shared
            if request.request_id in self.scheduler.followers:
                self.scheduler.follow(request, leader=self._owners[request.request_id].requests[0])
        gained: dict[str, CompletionGroup] = {}
        for request, token in zip(requests, tokens, strict=True):
            group = self._owners[request.request_id]
            gained[group.request_id] = group
            reason = self._completions[request.request_id].append(token, self.loaded.eos_token_ids)
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if self.recorder is not None:
                self.recorder.sampled(request, token.token_id)
            if reason is not None:
                request.metrics.finished_time = now
                self._retire(request)
        for group in gained.values():
            if group.finished:
                self._close(group)
        if self.recorder is not None:
            self.recorder.end_step(self.pool)
        return [group.output() for group in gained.values()]

    def _retire(self, request: Request) -> None:
        """Take a request that has its finish reason out of the scheduler; its blocks are free from here on."""
        if self.recorder is not None:
            self.recorder.finished(request)
        self.scheduler.finish(request)
        del self._requests[request.request_id], self._completions[request.request_id], self._owners[request.request_id]

    def _close(self, group: CompletionGroup) -> None:
        del self._groups[group.request_id]


def sequence_ids(request_id: str, params: SamplingParams) -> list[str]:
    """Ids of the n sequences that serve a request: its own if there is one, else its own and their number."""
    return [request_id] if params.n == 1 else [f"{request_id}/{k}" for k in range(params.n)]
