"""The engine: schedule, run, sample, update, and nothing else.

         ┌────────────── step() ────────────────────────────────────────────────┐
    add ─┼→ scheduler ──plan──→ runner ──logits──→ sampler ──tokens──→ groups ──┼→ one RequestOutput a request
         └──────↑──────────────────────────────────── forked, grown, ended ─────┘
                │ a failure here rolls the step back      │ one here fails its group

A step is a transaction. Until its tokens are committed, any failure rolls it back: requests keep their tokens and lose
the KV that may be half written. From then on the step has happened: a failure ends one group, and the outputs are
delivered, by this call of `step()` or, if an error or Ctrl-C ends that one, by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor

from labcore.config import EngineConfig
from labcore.engine.active_requests import Registry, sequence_ids
from labcore.engine.beams import BeamGroup, top_logprobs
from labcore.engine.completions import Completion, CompletionGroup
from labcore.engine.exclusive import Exclusive
from labcore.engine.faults import Faults
from labcore.engine.invariants import check_integrity, check_progress
from labcore.engine.model_runner import ModelRunner
from labcore.engine.recovery import Recovery
from labcore.engine.request_group import Change, Group
from labcore.engine.signals import interruptible, uninterrupted
from labcore.engine.validation import Gate
from labcore.kvcache.blocks import BlockPool, OutOfBlocks
from labcore.models import LoadedModel
from labcore.outputs import RequestOutput
from labcore.recorder import NullRecorder, Recorder
from labcore.request import Request, RequestStatus
from labcore.sampling.beam_search import BeamSearch
from labcore.sampling.detokenizer import Detokenizer
from labcore.sampling.sampler import SampledToken, Sampler, SamplingError, check_finite, draw_sound_rows
from labcore.sampling_params import BeamSearchParams, SamplingParams
from labcore.scheduler.budget import AdaptiveBudget
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.scheduler import Scheduler

Params = SamplingParams | BeamSearchParams
Drawn = SampledToken | list[tuple[int, float]] | SamplingError

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Spreads the seeds of requests that bring none over all 64 bits (golden ratio, as in splitmix64)."""


class Engine:
    """Serves many requests at once, one step at a time, to one caller at a time: others get EngineBusy.

    config      its settings; `max_model_len` and `num_blocks` are resolved to numbers
    loaded      model and tokenizer
    scheduler   plans steps, owns the queues and the block pool
    runner      computes them
    recorder    keeps the flight record; None: a NullRecorder, which keeps nothing
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
        self.recorder = NullRecorder() if recorder is None else recorder
        self.budget = budget
        self.sampler = Sampler(loaded.eos_token_ids)
        self.gate = Gate(config, loaded, scheduler.pool)
        self._clock = clock
        self._arrivals = 0
        self._steps = 0
        self._empty_steps = 0
        self._somebody_decodes = False
        self._served = Registry()
        self._recovery = Recovery(scheduler)
        self._exclusive = Exclusive()
        self._faults = Faults(self.parts)
        self._undelivered: dict[str, RequestOutput] = {}

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
        with self._changing():
            prompt = self.gate.check(request_id, prompt_token_ids, params, priority, arrival_time)
            self._check_unused("request_id", request_id, params)
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
            group = new_group(request_id, params, new_request)
            leader, *followers = group.requests
            self._enqueue(group, group.requests, partial(self.scheduler.add, leader, followers))
            self._served.groups[request_id] = group

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
        with self._changing():
            group, parent = self._served.forkable(request_id)
            temperature = parent.params.temperature if temperature is None else temperature
            params = replace(parent.params, n=1, seed=seed, temperature=temperature)
            self.gate.check_name("new_id", new_id)
            self._check_unused("new_id", new_id, params)
            arrival = self._next_arrival()
            child = parent.fork(
                new_id,
                params=params,
                seed=self._seed(params, arrival),
                arrival=arrival,
                arrival_time=self._clock(),
                arrival_step=self._steps,
            )
            child_group = group.fork(parent, child)
            self._enqueue(child_group, [child], partial(self.scheduler.fork, child, parent))
            self._served.groups[new_id] = child_group

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return an output for each request that gained a token in it, or failed.

        A request that can't go on (its logits are NaN, the tokenizer raises on its tokens) fails alone: its last output
        has finish_reason "error" and says why in `error`. If the step as a whole fails, or Ctrl-C breaks into it, its
        requests keep their tokens, lose the KV that may be half written, and are computed again by later steps.
        If this call raises after the step was complete, the next one returns the outputs, and computes nothing.
        Raises EngineBusy, OutOfBlocks if blocks that no request owns leave too few for a step, StandstillError if the
        scheduler plans nothing for several steps, and what the model or a part raises, with a note that names the part.
        """
        outputs: dict[str, RequestOutput] = {}
        try:
            with self._changing():
                if not self._undelivered:
                    self._advance()
                self._faults.raise_first()
                outputs, self._undelivered = self._undelivered, {}
            return list(outputs.values())
        except BaseException:  # a Ctrl-C that was held back
            self._undelivered.update(outputs)
            raise

    def request_ids(self) -> list[str]:
        """Ids of the requests that are being served, or whose last output is still to be delivered; by arrival."""
        return list(self._undelivered | self._served.groups)

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to compute or to deliver."""
        return bool(self._served.groups or self._undelivered)

    def abort(self, request_id: str) -> RequestOutput:
        """End a request, whatever it is doing, and return what it has so far, with finish_reason "abort".

        One that has ended, and whose output is still to be delivered, is returned as it ended.
        Raises ValueError for an id that is not (or no longer) being served.
        """
        with self._changing():
            ended = isinstance(request_id, str) and request_id not in self._served.groups
            if ended and request_id in self._undelivered:
                return self._undelivered.pop(request_id)
            group, now = self._served.group(request_id), self._clock()
            try:
                for request in group.abort(now):
                    self._retire(request)
            except BaseException as error:
                self._fail(group, error, now)
            del self._served.groups[request_id]
            self._undelivered.pop(request_id, None)
            return self._output(group, now)

    def reset_prefix_cache(self) -> None:
        """Evict every cached prefix. For weights that were changed in place: KV of the old ones would be reused in silence.

        Raises RuntimeError, and evicts nothing, while requests are unfinished: they hold KV of the old weights.
        """
        with self._changing():
            if self.has_unfinished_requests():
                raise RuntimeError(
                    f"{len(self.request_ids())} requests are unfinished, and hold KV of the weights as they were: step() "
                    "until they are done, or abort() them, before reset_prefix_cache()."
                )
            self.scheduler.prefix_cache.forget(range(self.pool.num_blocks))
            self._record("evicted")

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
        with self.exclusive():
            check_integrity(self.scheduler, self._served.requests.values(), self._recovery.unfreed)

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Params,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> list[int]:
        """The prompt as a list of ints, if the request can be served; raises ValueError if not. Changes nothing."""
        with self.exclusive():
            prompt = self.gate.check(request_id, prompt_token_ids, params, priority, arrival_time)
            self._check_unused("request_id", request_id, params)
            return prompt

    def parts(self) -> dict[str, object]:
        """The parts by the names under which a caller plugs them in."""
        scheduler = self.scheduler
        return {
            "block_pool": self.pool,
            "prefix_cache": scheduler.prefix_cache,
            "preemption": scheduler.preemption,
            "chunking": scheduler.chunking,
            "policy": scheduler.policy,
            "scheduler": scheduler,
            "recorder": self.recorder,
            "budget": self.budget,
            "tokenizer": self.loaded.tokenizer,
        }

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Several calls in a row without another thread in between; Ctrl-C breaks off a step, or waits for the end.

        Raises EngineBusy if another thread is at it.
        """
        with uninterrupted(), self._exclusive.one_thread():
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The engine changes inside: no other call, and no Ctrl-C but while the model runs."""
        with uninterrupted(), self._exclusive.one_call():
            try:
                yield
            except Exception as error:
                self._faults.name_part(error)
                raise

    def _check_unused(self, field: str, request_id: str, params: Params) -> None:
        self._served.check_unused(field, request_id, params)
        if request_id in self._undelivered:
            raise ValueError(f"{field} {request_id!r} is in use; its last output is still to be delivered by step().")

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

    def _enqueue(self, group: Group, requests: Sequence[Request], enqueue: Callable[[], None]) -> None:
        """Have the scheduler take new requests of a group in, all or none."""
        try:
            enqueue()
        except BaseException:
            for request in requests:
                self._recovery.take_out(request)
            raise
        for request in requests:
            self._served.enter(request, group)
            self._record("added", request)

    def _advance(self) -> None:
        """One step: plan, run, sample, commit; if that fails, roll back. Then update the groups."""
        self._recovery.free_tables()
        if not self._served.groups:
            return
        plan, requests = None, []
        started = self._clock()
        try:
            plan = self._plan()
            requests, drawn = self._compute(plan)
            now = self._clock()
            self._commit(plan, requests, drawn)
        except BaseException:
            self._roll_back(plan, requests)
            raise
        self._update(requests, drawn, now)
        if self.budget is not None and self._somebody_decodes:
            self._faults.attempt(self.budget.observe, plan.num_tokens, self._clock() - started)

    def _plan(self) -> SchedulerOutput:
        self._record("begin_step")
        if self.budget is not None:
            self._set_budget(self.budget)
        plan = self.scheduler.schedule()
        self._steps = plan.step
        now = self._clock()
        scheduled = [self._served.requests[request_id] for request_id in plan.num_scheduled_tokens]
        for request in scheduled:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
        self._record("scheduled", plan, scheduled)
        self._empty_steps = 0 if scheduled else self._empty_steps + 1
        if not scheduled:
            self._check_pool()
            check_progress(self.scheduler, self._served.requests.values(), self._empty_steps)
        return plan

    def _set_budget(self, budget: AdaptiveBudget) -> None:
        """While somebody waits for a next token, steps are as long as that allows. Nobody: as large as they may be."""
        running = self.scheduler.running
        self._somebody_decodes = any(request.num_uncomputed_tokens == 1 for request in running)
        tokens = budget.tokens(len(running)) if self._somebody_decodes else budget.largest
        self.scheduler.max_num_batched_tokens = tokens

    def _check_pool(self) -> None:
        """Raises OutOfBlocks if a step is empty because blocks are held by none of the requests."""
        tables = [request.table for request in self._served.requests.values()]
        owned = {block for table in tables for block in table.blocks}
        foreign = self.pool.num_blocks - self.pool.num_free - len(owned)
        if foreign > 0:
            raise OutOfBlocks(
                f"no request can be scheduled: {foreign} of the pool's {self.pool.num_blocks} blocks belong to no request, "
                f"and {self.pool.num_free} are free — give the others back with pool.free(), or abort() a request."
            )

    def _compute(self, plan: SchedulerOutput) -> tuple[list[Request], list[Drawn]]:
        """Run the model, and draw for the requests that have caught up. Ctrl-C may break in here."""
        if not plan.num_scheduled_tokens:
            return [], []
        with interruptible():
            requests, logits = self._with_followers(*self.runner.run(plan, self._served.requests))
            return requests, draw_sound_rows(self._draw, logits, requests)

    def _with_followers(self, requests: list[Request], logits: Tensor) -> tuple[list[Request], Tensor]:
        """A follower draws its first token from the very logits of its leader: [S, V] → [S + followers, V]."""
        followers = set(self.scheduler.followers)
        if not followers:
            return requests, logits
        rows, everyone = [], []
        for row, request in enumerate(requests):
            siblings = [] if request.output_token_ids else self._served.owners[request.request_id].requests
            family = [request, *(sibling for sibling in siblings if sibling.request_id in followers)]
            followers.difference_update(sibling.request_id for sibling in family)
            everyone += family
            rows += [row] * len(family)
        return everyone, logits[rows]

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> list[Drawn]:
        """A token for each request that is sampled, candidates for each that is a beam. logits: [S, V], S requests."""
        searched = [i for i, request in enumerate(requests) if isinstance(request.params, BeamSearchParams)]
        if not searched:
            return self.sampler(logits, requests)
        sampled = [i for i in range(len(requests)) if i not in set(searched)]
        drawn: dict[int, Drawn] = {}
        beams = [requests[i] for i in searched]
        check_finite(logits[searched].amax(dim=-1), beams)
        counts = [self._served.owners[beam.request_id].search.num_candidates for beam in beams]
        drawn.update(zip(searched, top_logprobs(logits[searched], counts), strict=True))
        drawn.update(zip(sampled, self.sampler(logits[sampled], [requests[i] for i in sampled]), strict=True))
        return [drawn[i] for i in range(len(requests))]

    def _commit(self, plan: SchedulerOutput, requests: list[Request], drawn: list[Drawn]) -> None:
        """The KV of the step is in place. What led to no sound logits is not for the prefix cache."""
        unsound = {r.request_id for r, result in zip(requests, drawn, strict=True) if isinstance(result, SamplingError)}
        for request_id, n in plan.num_scheduled_tokens.items():
            if request_id not in unsound:
                self.scheduler.computed(self._served.requests[request_id], n)
        for request in requests:  # before any of them can end, and give back the blocks that are to be shared
            if request.request_id in self.scheduler.followers:
                self.scheduler.follow(request, leader=self._served.owners[request.request_id].requests[0])

    def _roll_back(self, plan: SchedulerOutput | None, requests: list[Request]) -> None:
        """The step broke off: requests in it that still run lose the KV that may be half written, and wait again.

        Without a plan, every running request may have been in it.
        """
        in_step = {*plan.num_scheduled_tokens, *(r.request_id for r in requests)} if plan is not None else self._served.requests
        interrupted = [request for request in self.scheduler.running if request.request_id in in_step]
        self._recovery.roll_back(interrupted, self._served.requests.values())
        self._record("roll_back", self.pool)

    def _update(self, requests: list[Request], drawn: list[Drawn], now: float) -> None:
        """Give each group what was drawn for it. The step has happened: a failure from here on ends one group."""
        gained: dict[str, Group] = {}
        for request, result in zip(requests, drawn, strict=True):
            group = self._served.owners.get(request.request_id)
            if group is None:  # it has failed with another of its requests
                continue
            try:
                if isinstance(result, SamplingError):
                    raise result
                change = group.take(request, result, now)
                self._apply(change, group)
            except BaseException as error:
                self._fail(group, error, now)
                change = None
            if change is None or change.grown or change.ended:
                gained[group.request_id] = group
        for request_id, group in gained.items():
            self._undelivered[request_id] = self._output(group, now)
            if group.finished:
                del self._served.groups[request_id]
        self._record("end_step", self.pool)

    def _apply(self, change: Change, group: Group) -> None:
        """Forks come last: they take the slots of the beams that are dropped in the same round."""
        new = {id(child) for child, _ in change.forks}
        for request in change.grown:
            if id(request) not in new:  # a fork is recorded with the token that it brings
                self._record("sampled", request, request.output_token_ids[-1])
        for request in change.ended:
            self._retire(request)
        for child, parent in change.forks:
            self._enqueue(group, [child], partial(self.scheduler.fork, child, parent))

    def _output(self, group: Group, now: float) -> RequestOutput:
        """The group's output; if the tokenizer has none of it, the output of a group that failed."""
        try:
            return group.output()
        except BaseException as error:
            self._fail(group, error, now)
            return group.output()

    def _fail(self, group: Group, error: BaseException, now: float) -> None:
        """End a group that can't go on. If its KV may be what broke its logits, no other request may find it."""
        if not isinstance(error, Exception):  # Ctrl-C, for one, is for the caller as well
            self._faults.keep(error)
        if isinstance(error, SamplingError):
            for request in group.requests:
                self._faults.attempt(self.scheduler.prefix_cache.forget, request.table.blocks)
        why = error.why if isinstance(error, SamplingError) else self._faults.describe(error)
        for request in group.fail(why, now):
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Take a request that has its finish reason out of the scheduler; its blocks are free from here on."""
        self._faults.attempt(self._recovery.retire, request)
        self._served.leave(request)
        self._record("finished", request)

    def _record(self, event: str, *arguments: object) -> None:
        """Tell the recorder. Its failure stops nothing."""
        self._faults.attempt(lambda: getattr(self.recorder, event)(*arguments))
