"""The engine: schedule, run, update, and nothing else.

         ┌────────────── step() ────────────────────────────────────────────────┐
    add ─┼→ scheduler ──plan──→ runner ──logits──→ sampler ──tokens──→ groups ──┼→ one RequestOutput a request
         └──────↑──────────────────────────────────── forked, grown, ended ─────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from labcore.config import EngineConfig
from labcore.engine.active_requests import Registry, sequence_ids
from labcore.engine.beams import BeamGroup, top_logprobs
from labcore.engine.completions import Completion, CompletionGroup
from labcore.engine.invariants import check_integrity
from labcore.engine.model_runner import ModelRunner
from labcore.engine.request_group import Change, Group
from labcore.engine.signals import uninterrupted
from labcore.engine.validation import Gate
from labcore.kvcache.blocks import BlockPool
from labcore.models import LoadedModel
from labcore.outputs import RequestOutput
from labcore.recorder import Recorder
from labcore.request import Request, RequestStatus
from labcore.sampling.beam_search import BeamSearch
from labcore.sampling.detokenizer import Detokenizer
from labcore.sampling.sampler import SampledToken, Sampler
from labcore.sampling_params import BeamSearchParams, SamplingParams
from labcore.scheduler.budget import AdaptiveBudget
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.scheduler import Scheduler

Params = SamplingParams | BeamSearchParams
Drawn = SampledToken | list[tuple[int, float]]

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Spreads the seeds of requests that bring none over all 64 bits (golden ratio, as in splitmix64)."""


class Engine:
    """Serves many requests at once, one step at a time.

    config      its settings; `max_model_len` and `num_blocks` are resolved to numbers
    loaded      model and tokenizer
    scheduler   plans steps, owns the queues and the block pool
    runner      computes them
    recorder    keeps the flight record, or None
    budget      finds the token budget of each step from the seconds of those before, or None: it stays as it is
    clock       seconds, for metrics and the budget; which tokens come never depends on it
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        scheduler: Scheduler,
        runner: ModelRunner,
        recorder: Recorder | None = None,
        budget: AdaptiveBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.scheduler = scheduler
        self.runner = runner
        self.recorder = recorder
        self.budget = budget
        self.sampler = Sampler(loaded.eos_token_ids)
        self.gate = Gate(config, loaded, scheduler.pool)
        self._clock = clock
        self._arrivals = 0
        self._steps = 0
        self._somebody_decodes = False
        self._served = Registry()

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Params | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        *,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> None:
        """Queue a request. It joins the next step that has room for it.

        params         how to sample it, or BeamSearchParams to search it
        priority       matters under scheduling_policy="priority"; a smaller number goes first
        arrival_time   seconds on the engine's clock; None is now. For metrics only
        cache_salt     its prefix is shared only with requests of the same salt: one a tenant keeps tenants apart
        use_prefix_cache   False computes every token, and leaves nothing for others to find
        Raises ValueError, and queues nothing, for an id in use, an empty or too long prompt, a token id outside the
        vocabulary, and a request that the pool could never hold.
        """
        params = SamplingParams() if params is None else params
        self.gate.check_sharing(cache_salt, use_prefix_cache)
        prompt = self.check_request(request_id, prompt_token_ids, params, priority, arrival_time)
        new_request = partial(
            Request,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=self.gate.output_limit(len(prompt), params),
            priority=int(priority),
            arrival_time=self._clock() if arrival_time is None else float(arrival_time),
            cache_salt=cache_salt,
            use_prefix_cache=use_prefix_cache,
        )
        new_group = self._new_beams if isinstance(params, BeamSearchParams) else self._new_completions
        with uninterrupted():
            group = self._served.groups[request_id] = new_group(request_id, params, new_request)
            for request in group.requests:
                self._register(request, group)
            leader, *followers = group.requests
            self.scheduler.add(leader, followers)

    def fork(
        self, request_id: str, new_id: str, *, temperature: float | None = None, seed: int | None = None
    ) -> None:
        """Begin a request with all that another one, which is being served, has said so far. Each goes on by itself.

        Nothing is copied: the child owns the parent's blocks as well, the partly filled one too, of which whoever writes
        into it first takes a copy. Without a free slot, or from a parent that holds no KV, it queues as a newcomer.

        request_id    the parent's; of several continuations the one, as in "r/1"
        new_id        the child's own, as for `add_request`
        temperature   the child's; None is the parent's
        seed          the child's; None takes one from the engine, so that a sampled child says something else. What is
                      greedy says the same as its parent
        All else is as in the parent. Of its max_tokens the child has used as many as the parent has.
        Raises ValueError, and forks nothing, for an id that isn't served, that has several continuations, or that is a
        beam search, for a new_id that is in use, and for a bad temperature or seed.
        """
        group, parent = self._served.forkable(request_id)
        params = replace(
            parent.params, n=1, seed=seed, temperature=parent.params.temperature if temperature is None else temperature
        )
        self.gate.check_name("new_id", new_id)
        self._served.check_unused("new_id", new_id, params)
        with uninterrupted():
            arrival = self._next_arrival()
            child = parent.fork(
                new_id,
                params=params,
                seed=self._seed(params, arrival),
                arrival=arrival,
                arrival_time=self._clock(),
                arrival_step=self._steps,
            )
            self._served.groups[new_id] = group.fork(parent, child)
            self.scheduler.fork(child, parent)
            self._register(child, self._served.groups[new_id])

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return an output for each request that gained a token in it.

        If anything goes wrong while the model runs, the requests in the step keep their tokens, lose the KV that may be
        half written, and are computed again by later steps.
        """
        if not self.has_unfinished_requests():
            return []
        plan = None
        started = self._clock()
        try:
            with uninterrupted():
                plan = self._plan()
            requests, logits = self._with_followers(*self.runner.run(plan, self._served.requests))
            drawn = self._draw(requests, logits)
            with uninterrupted():
                outputs = self._update(plan, requests, drawn)
        except BaseException:
            with uninterrupted():
                self._roll_back(plan)
            raise
        if self.budget is not None and self._somebody_decodes:
            self.budget.observe(plan.num_tokens, self._clock() - started)
        return outputs

    def request_ids(self) -> list[str]:
        """Ids of the requests that are being served, in order of arrival."""
        return list(self._served.groups)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def abort(self, request_id: str) -> RequestOutput:
        """End a request, whatever it is doing, and return what it has so far, with finish_reason "abort".

        Raises ValueError for an id that is not (or no longer) being served.
        """
        group = self._served.group(request_id)
        with uninterrupted():
            for request in group.abort():
                request.metrics.finished_time = self._clock()
                self._retire(request)
            del self._served.groups[request_id]
        return group.output()

    def reset_prefix_cache(self) -> None:
        """Evict every cached prefix. For weights that were changed in place: KV of the old ones would be reused in silence.

        Raises RuntimeError, and evicts nothing, while requests are unfinished: they hold KV of the old weights.
        """
        if self.has_unfinished_requests():
            raise RuntimeError(
                f"{len(self.request_ids())} requests are unfinished, and hold KV of the weights as they were: step() until "
                "they are done, or abort() them, before reset_prefix_cache()."
            )
        with uninterrupted():
            self.scheduler.prefix_cache.forget(range(self.pool.num_blocks))

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
            "prefix_cache_queries": scheduler.prefix_cache_queries if self.config.enable_prefix_caching else 0,
            "prefix_cache_hits": scheduler.prefix_cache_hits,
            "kv_cache_usage": 1 - pool.num_free / pool.num_blocks,
        }

    def check_integrity(self) -> None:
        """Recompute refcounts, free list and request states from scratch; raises IntegrityError on any mismatch."""
        check_integrity(self.scheduler, self._served.requests.values())

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Params,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> list[int]:
        """The prompt as a list of ints, if the request can be served; raises ValueError if not. Changes nothing."""
        prompt = self.gate.check(request_id, prompt_token_ids, params, priority, arrival_time)
        self._served.check_unused("request_id", request_id, params)
        return prompt

    def _new_completions(
        self, request_id: str, params: SamplingParams, new_request: Callable[..., Request]
    ) -> CompletionGroup:
        completions = []
        for k, name in enumerate(sequence_ids(request_id, params)):
            arrival = self._next_arrival()
            request = new_request(request_id=name, arrival=arrival, seed=self._seed(params, arrival, k))
            if completions:  # the prompt is the same: its text is looked at once
                detokenizer = completions[0].detokenizer.fork()
            else:
                detokenizer = Detokenizer(self.loaded.decoder, request.prompt_token_ids, params)
            completions.append(Completion(k, request, detokenizer))
        return CompletionGroup(request_id, completions, self.loaded.eos_token_ids)

    def _new_beams(self, request_id: str, params: BeamSearchParams, new_request: Callable[..., Request]) -> BeamGroup:
        root = new_request(request_id=request_id, arrival=self._next_arrival(), seed=0)
        search = BeamSearch(params, self.loaded.eos_token_ids, root.max_tokens)
        return BeamGroup(request_id, root, search, self.loaded.decoder)

    def _seed(self, params: SamplingParams, arrival: int, k: int = 0) -> int:
        """What continuation k draws with: the caller's seed, or one that is the engine's and its own."""
        own = self.config.seed + (arrival + 1) * SEED_STRIDE if params.seed is None else params.seed + k
        return own % 2**63

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals - 1

    def _register(self, request: Request, group: Group) -> None:
        self._served.enter(request, group)
        if self.recorder is not None:
            self.recorder.added(request)

    def _plan(self) -> SchedulerOutput:
        if self.recorder is not None:
            self.recorder.begin_step()
        if self.budget is not None:
            self._set_budget(self.budget)
        plan = self.scheduler.schedule()
        self._steps = plan.step
        now = self._clock()
        scheduled = [self._served.requests[request_id] for request_id in plan.num_scheduled_tokens]
        for request in scheduled:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
        if self.recorder is not None:
            self.recorder.scheduled(plan, scheduled)
        return plan

    def _set_budget(self, budget: AdaptiveBudget) -> None:
        """While somebody waits for a next token, steps are as long as that allows. Nobody: as large as they may be."""
        running = self.scheduler.running
        self._somebody_decodes = any(request.num_uncomputed_tokens == 1 for request in running)
        tokens = budget.tokens(len(running)) if self._somebody_decodes else budget.largest
        self.scheduler.max_num_batched_tokens = tokens

    def _roll_back(self, plan: SchedulerOutput | None) -> None:
        """The step broke off: who was in it and still runs loses the KV that may be half written, and waits again.

        Without a plan nobody knows who would have been in it, and so it may be anyone who runs.
        """
        running = self.scheduler.running
        self.scheduler.roll_back([r for r in running if plan is None or r.request_id in plan.num_scheduled_tokens])
        if self.recorder is not None:
            self.recorder.end_step(self.pool)

    def _with_followers(self, requests: list[Request], logits: Tensor) -> tuple[list[Request], Tensor]:
        """A follower draws its first token from the very logits of its leader: [S, V] → [S + followers, V]."""
        if not self.scheduler.followers:
            return requests, logits
        rows, everyone = [], []
        for row, request in enumerate(requests):
            family = [request] if request.output_token_ids else self._served.owners[request.request_id].requests
            everyone += family
            rows += [row] * len(family)
        return everyone, logits[rows]

    def _draw(self, requests: list[Request], logits: Tensor) -> list[Drawn]:
        """A token for each request that is sampled, candidates for each that is a beam. logits: [S, V], S requests."""
        searched = [i for i, request in enumerate(requests) if isinstance(request.params, BeamSearchParams)]
        if not searched:
            return self.sampler(logits, requests)
        sampled = [i for i in range(len(requests)) if i not in set(searched)]
        drawn: dict[int, Drawn] = {}
        counts = [self._served.owners[requests[i].request_id].search.num_candidates for i in searched]
        drawn.update(zip(searched, top_logprobs(logits[searched], counts), strict=True))
        drawn.update(zip(sampled, self.sampler(logits[sampled], [requests[i] for i in sampled]), strict=True))
        return [drawn[i] for i in range(len(requests))]

    def _update(self, plan: SchedulerOutput, requests: list[Request], drawn: list[Drawn]) -> list[RequestOutput]:
        for request_id, n in plan.num_scheduled_tokens.items():
            self.scheduler.computed(self._served.requests[request_id], n)
        for request in requests:  # before any of them can end, and give back the blocks that are to be shared
            if request.request_id in self.scheduler.followers:
                self.scheduler.follow(request, leader=self._served.owners[request.request_id].requests[0])
        gained: dict[str, Group] = {}
        for request, result in zip(requests, drawn, strict=True):
            group = self._served.owners[request.request_id]
            change = group.take(request, result)
            self._apply(change, group)
            if change.grown or change.ended:
                gained[group.request_id] = group
        for group in gained.values():
            if group.finished:
                del self._served.groups[group.request_id]
        if self.recorder is not None:
            self.recorder.end_step(self.pool)
        return [group.output() for group in gained.values()]

    def _apply(self, change: Change, group: Group) -> None:
        now = self._clock()
        for child, parent in change.forks:
            self._register(child, group)
            self.scheduler.fork(child, parent)
        for request in change.grown:
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if self.recorder is not None:
                self.recorder.sampled(request, request.output_token_ids[-1])
        for request in change.ended:
            request.metrics.finished_time = now
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Take a request that has its finish reason out of the scheduler; its blocks are free from here on."""
        if self.recorder is not None:
            self.recorder.finished(request)
        self.scheduler.finish(request)
        self._served.leave(request)
