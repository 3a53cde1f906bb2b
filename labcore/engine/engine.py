"""The engine: schedule, run, sample, update, and nothing else.

         ┌────────────── step() ────────────────────────────────────────────────┐
    add ─┼→ scheduler ──plan──→ runner ──logits──→ sampler ──tokens──→ groups ──┼→ one RequestOutput a request
         └──────↑──────────────────────────────────────── finished, forked ─────┘
                │ a failure here rolls the step back      │ one here fails its group

A step is a transaction. Until its tokens are committed, any failure rolls it back: requests keep their tokens and lose
the KV that may be half written. After that a failure ends one group, and the step's outputs are delivered: by this call
of `step()` or, if an error or Ctrl-C ends it, by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor

from labcore.config import EngineConfig
from labcore.engine.active_requests import ActiveRequests
from labcore.engine.beams import BeamGroup, top_logprobs
from labcore.engine.completions import CompletionGroup
from labcore.engine.exclusive import Exclusive
from labcore.engine.faults import Faults
from labcore.engine.invariants import check_integrity, check_progress
from labcore.engine.model_runner import ModelRunner
from labcore.engine.recovery import Recovery
from labcore.engine.request_group import GroupUpdate, RequestGroup
from labcore.engine.signals import defer_sigint, interruptible
from labcore.engine.validation import RequestValidator
from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.models import LoadedModel
from labcore.outputs import RequestOutput
from labcore.recorder import NullRecorder, Recorder
from labcore.request import Request, RequestStatus
from labcore.sampling.beam_search import BeamSearch
from labcore.sampling.sampler import SampledToken, Sampler, SamplingError, check_finite, draw_sound_rows
from labcore.sampling_params import BeamSearchParams, SamplingParams
from labcore.scheduler.budget import AdaptiveBudget
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.scheduler import Scheduler

Params = SamplingParams | BeamSearchParams
Sampled = SampledToken | list[tuple[int, float]] | SamplingError

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Spreads the seeds of requests without one over all 64 bits (golden ratio, as in splitmix64)."""


class Engine:
    """Serves many requests at once, one step at a time, to one caller at a time: others get EngineBusy.

    config      its settings; `max_model_len` and `num_blocks` are resolved to numbers
    loaded      model and tokenizer
    scheduler   plans steps; owns the queues and, in its KV cache manager, the blocks
    runner      computes them
    recorder    keeps the flight record; None: a NullRecorder, which keeps nothing
    budget      adapts the token budget to the duration of earlier steps; None: max_num_batched_tokens
    clock       seconds, for metrics and the budget. No token depends on it
    beam_search class of the searches
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
        beam_search: type[BeamSearch] = BeamSearch,
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.scheduler = scheduler
        self.runner = runner
        self.recorder = NullRecorder() if recorder is None else recorder
        self.budget = budget
        self.sampler = Sampler(loaded.eos_token_ids)
        self.validator = RequestValidator(config, loaded, scheduler.kv.pool)
        self._clock = clock
        self._new_group = {False: CompletionGroup.create, True: partial(BeamGroup.create, beam_search=beam_search)}
        self._arrivals = 0
        self._steps = 0
        self._empty_steps = 0
        self._any_decoding = False
        self._active = ActiveRequests()
        self._recovery = Recovery(scheduler)
        self._exclusive = Exclusive()
        self._faults = Faults(self.parts)
        self._undelivered: dict[str, RequestOutput] = {}

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.kv.pool

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
        """Queue a request. The scheduler admits it as soon as it fits.

        params         SamplingParams, or BeamSearchParams for a beam search
        priority       used under scheduling_policy="priority"; a smaller number goes first
        arrival_time   seconds on the engine's clock; None is now. For metrics only
        cache_salt     its prefix is shared only with requests of the same salt: one per tenant keeps tenants apart
        use_prefix_cache   False computes every token, and registers no block for other requests
        Raises ValueError, and queues nothing, for an id in use, an empty or too long prompt, a token id outside the
        vocabulary, and a request that the pool could never hold.
        """
        params = SamplingParams() if params is None else params
        self.validator.check_sharing(cache_salt, use_prefix_cache)
        with self._changing():
            prompt = self.validator.validate(request_id, prompt_token_ids, params, priority, arrival_time)
            self._check_unused("request_id", request_id, params)
            max_tokens = self.validator.output_limit(len(prompt), params)
            arrival_time = self._clock() if arrival_time is None else float(arrival_time)

            def new_request(sequence_id: str, k: int) -> Request:
                arrival = self._next_arrival()
                return Request(
                    sequence_id,
                    prompt,
                    params,
                    arrival,
                    max_tokens,
                    seed=self._seed(params, arrival, k),
                    priority=int(priority),
                    arrival_time=arrival_time,
                    cache_salt=cache_salt,
                    use_prefix_cache=use_prefix_cache,
                )

            group = self._new_group[params.is_search](request_id, params, new_request, self.loaded)
            owner, *siblings = group.requests
            self._enqueue(group, group.requests, partial(self.scheduler.add, owner, siblings))
            self._active.groups[request_id] = group

    def fork(
        self, request_id: str, new_id: str, *, temperature: float | None = None, seed: int | None = None
    ) -> None:
        """Fork a request: the child begins with the parent's tokens so far, and the two go on independently.

        No KV is copied: both own the parent's blocks. The first write into a half-filled shared block is a copy-on-write.
        If no slot is free, or the parent holds no KV, the child waits in the queue like a new request.

        request_id    the parent's; with n > 1 that of one sequence, as in "r/1"
        new_id        the child's own, as for `add_request`
        temperature   the child's; None is the parent's
        seed          the child's; None takes one from the engine, so that a sampled child differs from its parent. A
                      greedy child gives the parent's tokens
        All other parameters are the parent's. The parent's tokens so far count towards the child's max_tokens.
        Raises ValueError, and forks nothing, for an id that isn't active, that has several sequences, or that is a beam
        search, for a new_id that is in use, and for a bad temperature or seed.
        """
        with self._changing():
            group, parent = self._active.forkable(request_id)
            temperature = parent.params.temperature if temperature is None else temperature
            params = replace(parent.params, n=1, seed=seed, temperature=temperature)
            self.validator.check_name("new_id", new_id)
            self._check_unused("new_id", new_id, params)
            arrival = self._next_arrival()
            child = parent.fork(
                new_id,
                params=params,
                seed=self._seed(params, arrival, 0),
                arrival=arrival,
                arrival_time=self._clock(),
                arrival_step=self._steps,
            )
            child_group = group.fork(parent, child)
            self._enqueue(child_group, [child], partial(self.scheduler.fork, child, parent))
            self._active.groups[new_id] = child_group

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return an output for each request that gained a token in it, or failed.

        A request that can't go on (its logits are NaN, the tokenizer raises on its tokens) fails alone: its last output
        has finish_reason "error" and the reason in `error`. If the step as a whole fails, or Ctrl-C interrupts it, its
        requests keep their tokens, lose the KV that may be half written, and are computed again by later steps.
        If this call raises after the step was complete, the next call returns the outputs, and computes nothing.
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
        """Ids of the unfinished requests, and of those whose last output is still to be delivered; by arrival."""
        return list(self._undelivered | self._active.groups)

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to compute or to deliver."""
        return bool(self._active.groups or self._undelivered)

    def abort(self, request_id: str) -> RequestOutput:
        """Finish a request, running or waiting, and return its output so far, with finish_reason "abort".

        If it is finished, and its output still to be delivered, that output is returned.
        Raises ValueError for an id that is not, or no longer, active.
        """
        with self._changing():
            finished = isinstance(request_id, str) and request_id not in self._active.groups
            if finished and request_id in self._undelivered:
                return self._undelivered.pop(request_id)
            group, now = self._active.group(request_id), self._clock()
            try:
                for request in group.abort(now):
                    self._retire(request)
            except BaseException as error:
                self._fail(group, error, now)
            del self._active.groups[request_id]
            self._undelivered.pop(request_id, None)
            return self._output(group, now)

    def reset_prefix_cache(self) -> None:
        """Evict every cached prefix. Call it after weights were changed in place: KV of the old ones would be reused.

        Raises RuntimeError, and evicts nothing, while requests are unfinished: they hold KV of the old weights.
        """
        with self._changing():
            if self.has_unfinished_requests():
                raise RuntimeError(
                    f"{len(self.request_ids())} requests are unfinished, and hold KV of the weights as they were: step() "
                    "until they are done, or abort() them, before reset_prefix_cache()."
                )
            self.scheduler.kv.evict()
            self._record("evicted")

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters by the names of the contract; kv_cache_usage is the share of blocks in use, 0 … 1."""
        pool, kv, scheduler = self.pool, self.scheduler.kv, self.scheduler
        waiting = scheduler.waiting_requests()
        num_swapped = sum(request.status is RequestStatus.SWAPPED for request in waiting)
        return {
            "num_running": len(scheduler.running),
            "num_waiting": len(waiting) - num_swapped,
            "num_swapped": num_swapped,
            "num_free_blocks": pool.num_free,
            "num_total_blocks": pool.num_blocks,
            "num_preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": kv.prefix_cache_queries if self.config.enable_prefix_caching else 0,
            "prefix_cache_hits": kv.prefix_cache_hits,
            "kv_cache_usage": 1 - pool.num_free / pool.num_blocks,
        }

    def check_integrity(self) -> None:
        """Recompute refcounts, free list and request states from scratch; raises IntegrityError on any mismatch."""
        with self.exclusive():
            check_integrity(self.scheduler, self._active.requests.values(), self._recovery.unfreed)

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Params,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> list[int]:
        """Validate a request without queueing it. Returns its prompt as a list of ints; raises ValueError."""
        with self.exclusive():
            prompt = self.validator.validate(request_id, prompt_token_ids, params, priority, arrival_time)
            self._check_unused("request_id", request_id, params)
            return prompt

    def parts(self) -> dict[str, object]:
        """The pluggable parts, by the names of `build_engine`."""
        scheduler = self.scheduler
        return {
            "block_pool": self.pool,
            "block_table": None if scheduler.kv.block_table is BlockTable else scheduler.kv.block_table,
            "prefix_cache": scheduler.kv.prefix_cache,
            "kv_cache_manager": scheduler.kv,
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
        """Keep other threads out between several calls. Ctrl-C interrupts a step, or is delivered at the end.

        Raises EngineBusy if another thread uses the engine.
        """
        with defer_sigint(), self._exclusive.one_thread():
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Engine state is updated inside: no other call, and no Ctrl-C except while the model runs."""
        with defer_sigint(), self._exclusive.one_call():
            try:
                yield
            except Exception as error:
                self._faults.name_part(error)
                raise

    def _check_unused(self, field: str, request_id: str, params: Params) -> None:
        self._active.check_unused(field, request_id, params)
        if request_id in self._undelivered:
            raise ValueError(f"{field} {request_id!r} is in use; its last output is still to be delivered by step().")

    def _seed(self, params: Params, arrival: int, k: int) -> int:
        """Seed of sequence k: from the request's own seed, or from the engine's. A search has none, and samples nothing."""
        own = getattr(params, "seed", None)
        return (self.config.seed + (arrival + 1) * SEED_STRIDE if own is None else own + k) % 2**63

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals - 1

    def _enqueue(self, group: RequestGroup, requests: Sequence[Request], enqueue: Callable[[], None]) -> None:
        """Add new sequences of a group to the scheduler: all, or none if it raises."""
        try:
            enqueue()
        except BaseException:
            for request in requests:
                self._recovery.take_out(request)
            raise
        for request in requests:
            self._active.add(request, group)
            self._record("added", request)

    def _advance(self) -> None:
        """One step: plan, run, sample, commit; if that fails, roll back. Then update the groups."""
        self._recovery.free_tables()
        if not self._active.groups:
            return
        plan, requests = None, []
        started = self._clock()
        try:
            plan = self._plan()
            requests, sampled = self._compute(plan)
            now = self._clock()
            self._commit(plan, requests, sampled)
        except BaseException:
            self._roll_back(plan, requests)
            raise
        self._update(requests, sampled, now)
        if self.budget is not None and self._any_decoding:
            self._faults.attempt(self.budget.observe, plan.num_tokens, self._clock() - started)

    def _plan(self) -> SchedulerOutput:
        self._record("begin_step")
        plan = self.scheduler.schedule(self._token_budget())
        self._steps = plan.step
        now = self._clock()
        scheduled = [self._active.requests[request_id] for request_id in plan.num_scheduled_tokens]
        for request in scheduled:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
        self._record("scheduled", plan, scheduled)
        self._empty_steps = 0 if scheduled else self._empty_steps + 1
        if not scheduled:
            check_progress(self.scheduler, self._active.requests.values(), self._empty_steps)
        return plan

    def _token_budget(self) -> int | None:
        """While any request decodes, use the adaptive budget; otherwise its maximum. None: the scheduler's own."""
        if self.budget is None:
            return None
        running = self.scheduler.running
        self._any_decoding = any(request.num_uncomputed_tokens == 1 for request in running)
        return self.budget.tokens(len(running)) if self._any_decoding else self.budget.largest

    def _compute(self, plan: SchedulerOutput) -> tuple[list[Request], list[Sampled]]:
        """Run the model, and sample for the requests that have caught up. Ctrl-C may interrupt here."""
        if not plan.num_scheduled_tokens:
            return [], []
        with interruptible():
            requests, logits = self.runner.run(plan, self._active.requests)
            return requests, draw_sound_rows(self._sample, logits, requests)

    def _sample(self, logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
        """What each group takes for its sequence: a token, or candidates. logits: [S, V], S requests."""
        counts = [self._active.owners[request.request_id].num_candidates for request in requests]
        beams = [i for i, count in enumerate(counts) if count]
        if not beams:
            return self.sampler(logits, requests)
        others = [i for i, count in enumerate(counts) if not count]
        check_finite(logits[beams].amax(dim=-1), [requests[i] for i in beams])
        candidates = top_logprobs(logits[beams], [counts[i] for i in beams])
        tokens = self.sampler(logits[others], [requests[i] for i in others])
        sampled = dict(zip([*beams, *others], [*candidates, *tokens], strict=True))
        return [sampled[i] for i in range(len(requests))]

    def _commit(self, plan: SchedulerOutput, requests: list[Request], sampled: list[Sampled]) -> None:
        """The KV of the step is in place. That of a sequence with unsound logits must not reach the prefix cache.

        Before any request can finish: its siblings share the blocks of its prompt here.
        """
        unsound = {r.request_id for r, result in zip(requests, sampled, strict=True) if isinstance(result, SamplingError)}
        for request_id, n in plan.num_scheduled_tokens.items():
            if request_id not in unsound:
                self.scheduler.commit(self._active.requests[request_id], n)

    def _roll_back(self, plan: SchedulerOutput | None, requests: list[Request]) -> None:
        """The step failed: running requests in it lose the KV that may be half written, and wait again.

        Without a plan, every running request may have been in it.
        """
        in_step = {*plan.num_scheduled_tokens, *(r.request_id for r in requests)} if plan is not None else self._active.requests
        interrupted = [request for request in self.scheduler.running if request.request_id in in_step]
        self._recovery.roll_back(interrupted, self._active.requests.values())
        self._record("roll_back", self.pool)

    def _update(self, requests: list[Request], sampled: list[Sampled], now: float) -> None:
        """Give each group what was sampled for it. The step is committed: a failure from here on ends one group."""
        changed: dict[str, RequestGroup] = {}
        for request, result in zip(requests, sampled, strict=True):
            group = self._active.owners.get(request.request_id)
            if group is None:  # it has failed with another of its sequences
                continue
            try:
                if isinstance(result, SamplingError):
                    raise result
                update = group.on_sampled(request, result, now)
                self._apply(update, group)
            except BaseException as error:
                self._fail(group, error, now)
                update = None
            if update is None or update.advanced or update.finished:
                changed[group.request_id] = group
        for request_id, group in changed.items():
            self._undelivered[request_id] = self._output(group, now)
            if group.finished:
                del self._active.groups[request_id]
        self._record("end_step", self.pool)

    def _apply(self, update: GroupUpdate, group: RequestGroup) -> None:
        """Forks come last: they take the slots of the beams that are dropped in the same round."""
        new = {id(child) for child, _ in update.forked}
        for request in update.advanced:
            if id(request) not in new:  # a fork is recorded with the token that it brings
                self._record("sampled", request, request.output_token_ids[-1])
        for request in update.finished:
            self._retire(request)
        for child, parent in update.forked:
            self._enqueue(group, [child], partial(self.scheduler.fork, child, parent))

    def _output(self, group: RequestGroup, now: float) -> RequestOutput:
        """The group's output. If the tokenizer raises, the group fails, and this is the output of a failed group."""
        try:
            return group.output()
        except BaseException as error:
            self._fail(group, error, now)
            return group.output()

    def _fail(self, group: RequestGroup, error: BaseException, now: float) -> None:
        """Finish a group that can't go on. If its logits were unsound, its KV may be, too, and is evicted."""
        if not isinstance(error, Exception):  # Ctrl-C, for one, is for the caller as well
            self._faults.keep(error)
        if isinstance(error, SamplingError):
            for request in group.requests:
                self._faults.attempt(self.scheduler.kv.evict, request.table.blocks)
        why = error.why if isinstance(error, SamplingError) else self._faults.describe(error)
        for request in group.fail(why, now):
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Take a finished sequence out of the scheduler; its blocks are free from here on."""
        self._faults.attempt(self._recovery.retire, request)
        self._active.remove(request)
        self._record("finished", request)

    def _record(self, event: str, *arguments: object) -> None:
        """Tell the recorder. Its failure stops nothing."""
        self._faults.attempt(lambda: getattr(self.recorder, event)(*arguments))
