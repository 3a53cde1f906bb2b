"""Exercises of notebook 04, the scheduler: waiting queue, admission, aging, choice of victims, and a bug hunt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from labcore.course.exercises.nb04_planted import CopyingScheduler
from labcore.course.learner.exercise import BugHunt, Exercise, expect, expect_attributes, expect_equal, show
from labcore.engine.invariants import IntegrityError, check_integrity
from labcore.kvcache.blocks import BlockPool
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import NoPrefixCache
from labcore.request import Request, RequestStatus
from labcore.sampling_params import SamplingParams
from labcore.scheduler.chunking import WholePrompts
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.policy import FirstComeFirstServed, Policy, PriorityWithAging
from labcore.scheduler.preemption import Recompute

SIZE = 4  # block size of every pool in these checks


class MendedScheduler(CopyingScheduler):
    """`CopyingScheduler` as notebook 04 mends it: a request that was preempted in this step is skipped."""

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        def is_running(request: Request) -> bool:
            return request.status == RequestStatus.RUNNING

        for asking in list(self.running):
            n = self.chunking.num_tokens(asking, budget, self.max_num_batched_tokens)
            while is_running(asking) and asking.table.blocks_needed(n) > self.kv.pool.num_free:
                least_entitled = self.running[-1]
                self._preempt(least_entitled, plan)
            if is_running(asking) and n > 0:  # a victim computes nothing in this step
                self._reserve(asking, n, plan)
                budget -= n
        return budget


class CountingPolicy(FirstComeFirstServed):
    """First come, first served, and it knows how often it was asked for a key."""

    def __init__(self) -> None:
        self.asked = 0

    def sort_key(self, request: Request) -> tuple:
        self.asked += 1
        return super().sort_key(request)


def check_queue(WaitingQueue: Any) -> None:
    expect_attributes(WaitingQueue, "push", "discard", "peek", "pop")
    queue = WaitingQueue(FirstComeFirstServed())
    ana, bo, cy = (new_request(name, arrival, 4) for arrival, name in enumerate(("ana", "bo", "cy")))
    for request in (cy, ana, bo):
        queue.push(request)
    said = "Cy, Ana and Bo were pushed in this order, and arrived as Ana, Bo, Cy"
    expect_equal(who(queue.peek()), "ana", f"{said}; peek()")
    expect_equal(len(queue), 3, f"{said}; len(queue) after peek()", hint=1)
    expect_equal(who(queue.pop()), "ana", f"{said}; pop()")
    expect_equal(len(queue), 2, f"{said}; len(queue) after pop()", hint=3)
    expect_equal(who(queue.peek()), "bo", f"{said}; peek() after Ana was popped", hint=3)
    queue.discard(bo)
    expect_equal(who(queue.peek()), "cy", f"{said}; Ana was popped, Bo hung up; peek()", hint=2)
    queue.push(ana)
    expect_equal(who(queue.pop()), "ana", f"{said}; Ana was popped and pushed again; pop()", hint=3)
    for name, arrival in (("di", 5), ("eve", 6), ("fay", 7)):
        queue.push(new_request(name, arrival, 4))
    queue.discard(cy)
    again = new_request("cy", 9, 4)
    queue.push(again)
    said = "Di, Eve and Fay came, Cy hung up, and there came another Cy"
    expect_equal(who(queue.pop()), "di", f"{said}; pop()", hint=2)
    expect_equal([who(queue.pop()), who(queue.pop())], ["eve", "fay"], f"{said}; two more pop()", hint=2)
    expect(queue.pop() is again, f"{said}; three were popped; pop() gave the Cy who hung up", "the one who came", hint=2)
    expect_equal(len(queue), 0, f"{said}; len(queue) after all were popped", hint=3)
    check_no_search(WaitingQueue)


def check_no_search(WaitingQueue: Any) -> None:
    policy = CountingPolicy()
    queue = WaitingQueue(policy)
    crowd = [new_request(f"r{i}", i, 1) for i in range(1000)]
    for request in crowd:
        queue.push(request)
    for request in crowd[:500]:
        queue.discard(request)
    policy.asked = 0
    order = [who(queue.pop()) for _ in range(500)]
    expect_equal(order, names(crowd[500:]), "1,000 were pushed, the first 500 hung up, and 500 were popped", hint=2)
    said = f"500 of 1,000 were popped, and the policy was asked for {policy.asked:,} keys"
    expect(policy.asked <= 1000, said, "the keys that were worked out when they were pushed", hint=3)


def check_admission(Scheduler: Any) -> None:
    expect_attributes(Scheduler, "add", "_admit", "_reserve", "_can_admit", "_first_chunk", "_schedule_waiting")
    three = {"ana": 6, "bo": 3, "cy": 9}
    asked = "Ana (6 tokens), Bo (3) and Cy (9) wait; 4 seats, a budget of 64, 20 blocks of 4 free"
    scheduler, plan = admit(Scheduler, three, asked)
    expect_equal(plan.num_scheduled_tokens, three, f"{asked}: the plan", hint=2)
    expect_equal(list(plan.num_scheduled_tokens), list(three), f"{asked}: the order of the plan", hint=2)
    expect_equal(names(scheduler.running), list(three), f"{asked}: those who run", hint=2)
    expect_equal(len(scheduler.waiting), 0, f"{asked}: how many still wait", hint=2)
    expect_equal(20 - scheduler.kv.pool.num_free, 2 + 1 + 3, f"{asked}: blocks taken", hint=2)

    asked = "Ana, Bo and Cy wait, and there are 2 seats"
    expect_admitted(Scheduler, three, ["ana", "bo"], asked, seats=2)
    asked = "Ana (6 tokens), Bo (3) and Cy (9) wait, and the budget is 12, of which Ana and Bo leave 3"
    expect_admitted(Scheduler, three, ["ana", "bo"], asked, budget=12)
    four = {"ana": 6, "bo": 9, "cy": 2}
    asked = "Ana (6 tokens), Bo (9) and Cy (2) wait, and the budget is 12: Bo's prompt is too long for what Ana leaves"
    expect_admitted(Scheduler, four, ["ana"], asked, budget=12, hint=3)
    asked = "Ana (6 tokens), Bo (9) and Cy (2) wait, and 4 blocks are free, of which Ana takes 2: Bo needs 3, Cy only 1"
    expect_admitted(Scheduler, four, ["ana"], asked, num_blocks=4, watermark=0, hint=3)
    asked = "Ana (6 tokens), Bo (9) and Cy (2) wait, and there are exactly the 6 blocks that they need"
    expect_admitted(Scheduler, four, ["ana", "bo", "cy"], asked, num_blocks=6, watermark=0)
    asked = "Ana (8 tokens) waits, the budget is 8, and so are the tokens that she needs"
    expect_admitted(Scheduler, {"ana": 8}, ["ana"], asked, budget=8)
    check_watermark(Scheduler)
    asked = "Ana waits, and the budget is used up"
    expect_admitted(Scheduler, {"ana": 6}, [], asked, budget=0)


def check_watermark(Scheduler: Any) -> None:
    two = {"ana": 6, "bo": 6}
    asked = (
        "Ana and Bo wait with 6 tokens each; of 5 blocks Ana takes 2, and one block for each of the two is to be left"
    )
    expect_admitted(Scheduler, two, ["ana"], asked, num_blocks=5, hint=2)
    asked = "Ana and Bo wait with 6 tokens each; of 6 blocks they take 4, and one block for each of the two is left"
    expect_admitted(Scheduler, two, ["ana", "bo"], asked, num_blocks=6)
    asked = "Ana and Bo wait with 6 tokens each, 5 blocks are free, and keep_watermark is False: the watermark is not asked"
    expect_admitted(Scheduler, two, ["ana", "bo"], asked, num_blocks=5, keep_watermark=False, hint=2)


def expect_admitted(
    Scheduler: Any, lengths: dict[str, int], expected: list[str], asked: str, hint: int = 1, **settings: Any
) -> None:
    """Go on if just these are admitted, in this order, and everybody else is still in the queue."""
    scheduler, plan = admit(Scheduler, lengths, asked, **settings)
    expect_equal(list(plan.num_scheduled_tokens), expected, f"{asked}: those in the plan", hint)
    expect_equal(names(scheduler.running), expected, f"{asked}: those who run", hint)
    left = [name for name in lengths if name not in expected]
    expect_equal(names(scheduler.waiting), left, f"{asked}: those who still wait", hint=2)


def admit(
    Scheduler: Any, lengths: dict[str, int], asked: str, *, num_blocks: int = 20, seats: int = 4, budget: int = 64,
    watermark: int = 1, keep_watermark: bool = True,
) -> tuple[Any, SchedulerOutput]:  # fmt: skip
    """A scheduler of the learner's class after `_schedule_waiting`, and its plan."""
    scheduler = scheduler_of(Scheduler, num_blocks, seats, max(budget, 1), watermark=watermark)
    for arrival, (name, prompt) in enumerate(lengths.items()):
        scheduler.add(new_request(name, arrival, prompt))
    plan = SchedulerOutput(1)
    scheduler._schedule_waiting(plan, budget, keep_watermark)
    expect(plan.num_tokens <= budget, f"{asked}: {plan.num_tokens} tokens are in the plan", f"{budget} at most", hint=1)
    return scheduler, plan


def check_aging(Policy: Any) -> None:
    expect_attributes(Policy, "sort_key", "can_preempt")
    policy = Policy(aging=10)

    def request(priority: int, step: int, arrival: int = 0) -> Request:
        made = new_request(f"p{priority}", arrival, 4, priority=priority)
        made.arrival_step = step
        return made

    def ahead(first: Request, second: Request, said: str, hint: int = 1) -> None:
        keys = policy.sort_key(first), policy.sort_key(second)
        expect(
            keys[0] < keys[1], f"{said}; their keys are {show(keys[0])} and {show(keys[1])}", "the first smaller", hint
        )

    ahead(request(0, 5, 1), request(1, 5, 0), "priority 0 and priority 1 arrived in the same step")
    ahead(request(0, 9, 1), request(1, 0, 0), "priority 0 came 9 steps after priority 1, and aging is 10", hint=2)
    ahead(request(1, 0, 0), request(0, 11, 1), "priority 1 came 11 steps before priority 0, and aging is 10", hint=2)
    ahead(request(3, 0, 0), request(1, 21, 1), "priority 3 came 21 steps before priority 1, and aging is 10", hint=2)
    ahead(
        request(1, 0, 0), request(0, 10, 1), "priority 1 came 10 steps before priority 0 and first, and aging is 10", 2
    )
    ahead(request(2, 5, 3), request(2, 5, 7), "two of priority 2 came in the same step, in this order", hint=1)
    twin = request(2, 5, 3)
    twin.beam_id = 1
    ahead(request(2, 5, 3), twin, "two beams of one search differ in their birth alone", hint=1)
    running = request(1, 0)
    key = policy.sort_key(running)
    running.output_token_ids, running.num_computed_tokens = [0] * 9, 12
    expect_equal(policy.sort_key(running), key, "a request was asked for its key again, 9 tokens later", hint=2)

    for waiting, other, expected, said in (
        (request(0, 5, 1), request(1, 5, 0), True, "priority 0 waits, priority 1 of the same step runs"),
        (request(1, 5, 1), request(0, 5, 0), False, "priority 1 waits, priority 0 runs"),
        (request(1, 0, 0), request(1, 5, 1), False, "priority 1 waits since step 0, an equal one of step 5 runs"),
        (request(1, 5, 1), request(1, 0, 0), False, "priority 1 waits since step 5, an equal one of step 0 runs"),
        (
            request(0, 30, 1),
            request(1, 0, 0),
            False,
            "priority 0 came in step 30, priority 1 of step 0 runs; aging is 10",
        ),
        (request(1, 0, 0), request(0, 30, 1), False, "priority 1 waits since step 0, priority 0 of step 30 runs"),
    ):
        expect_equal(bool(policy.can_preempt(waiting, other)), expected, f"{said}: can_preempt(waiting, running)", hint=3)


def check_victims(Scheduler: Any) -> None:
    expect_attributes(Scheduler, "_victims", "_admit", "_reserve")
    a, b, c, d = ("a", 1), ("b", 5), ("c", 5), ("d", 9)  # name, priority; each holds 2 blocks
    full = "a (priority 1), b and c (5) and d (9) run with 2 blocks each, all 4 seats are taken"
    expect_victims(Scheduler, [a, b, c, d], 0, ["d"], f"{full}; urgent (0) needs a seat and no block")
    expect_victims(
        Scheduler, [a, b, c, d], -3, ["d"], f"{full}; urgent (0) needs a seat, and 3 blocks more are free", 2
    )
    expect_victims(Scheduler, [a, b, c, d], 2, ["d"], f"{full}; urgent (0) needs a seat and 2 blocks", hint=2)
    expect_victims(Scheduler, [a, b, c, d], 3, ["d", "c"], f"{full}; urgent (0) needs a seat and 3 blocks", hint=2)
    expect_victims(Scheduler, [a, b, c, d], 9, None, f"{full}; urgent (0) needs 9 blocks, they have 8 in all", hint=3)
    expect_victims(
        Scheduler, [a, b], 0, [], "a and b run, 2 seats are free; urgent (0) needs nothing of theirs", hint=2
    )
    expect_victims(Scheduler, [a, b], 1, ["b"], "a and b run, 2 seats are free; urgent (0) needs 1 block", hint=2)
    said = f"{full}; urgent (5) needs 3 blocks: it outranks d alone, who has 2"
    expect_victims(Scheduler, [a, b, c, d], 3, None, said, hint=3, priority=5)
    said = "four of priority 5 run on 4 seats; another of priority 5 would like one"
    expect_victims(Scheduler, [("a", 5), ("b", 5), ("c", 5), ("d", 5)], 0, None, said, hint=3, priority=5)
    said = "a (priority 1), c (5) and d (9) run on 4 seats; d shares both its blocks; urgent (0) needs 2 blocks"
    expect_victims(Scheduler, [a, c, d], 2, ["d", "c"], said, hint=3, shared="d")
    said = "a (priority 1), c (5) and d (9) run on 4 seats; d holds 2 blocks, and c the same two; urgent (0) needs 2 blocks"
    expect_victims(Scheduler, [a, c, d], 2, ["d", "c"], said, hint=3, twins=("c", "d"))
    said = "a (priority 1), c (5) and d (9) run on 4 seats; d holds 2 blocks, and a the same two; urgent (1) needs 3 blocks"
    expect_victims(Scheduler, [a, c, d], 3, None, said, hint=3, priority=1, twins=("a", "d"))
    late = ("late", 0, 9500)  # urgent, and came when the others had waited for long: the last of all
    full = "a (priority 1), c (5), d (9) and last late (0, came in step 9500) run on 4 seats, 2 blocks each"
    expect_victims(
        Scheduler, [a, c, d, late], 0, ["d"], f"{full}; urgent (2) needs a seat and outranks c and d", 3, priority=2
    )
    expect_victims(Scheduler, [a, c, d, late], 3, ["d", "c"], f"{full}; urgent (2) needs 3 blocks", 3, priority=2)
    expect_victims(Scheduler, [a, c, d, late], 5, None, f"{full}; urgent (2) needs 5 blocks", 3, priority=2)


def expect_victims(
    Scheduler: Any, running: Sequence[tuple], missing: int, expected: list[str] | None, said: str,
    hint: int = 1,
    *, priority: int = 0, shared: str = "", twins: tuple[str, str] = ("", ""),
) -> None:  # fmt: skip
    """Put these in the seats, ask for the victims, and see that nothing else happened.

    running: (name, priority) each, and the step of arrival if it isn't 0
    """
    scheduler = scheduler_of(Scheduler, num_blocks=12, seats=4, policy=PriorityWithAging(1000))
    for arrival, (name, urgency, *came) in enumerate(running):
        request = new_request(name, arrival, 2 * SIZE, priority=urgency)
        request.arrival_step = came[0] if came else 0
        scheduler.kv.open_table(request)
        scheduler._admit(request, [])
        if name == twins[1]:
            request.table = next(r.table for r in scheduler.running if r.request_id == twins[0]).fork()
        else:
            scheduler._reserve(request, 2 * SIZE, SchedulerOutput(1))
        if name == shared:
            scheduler.kv.pool.share(request.table.blocks)
    free = scheduler.kv.pool.num_free
    victims = scheduler._victims(new_request("urgent", 99, SIZE, priority=priority), missing)
    if victims is not None:
        expect(isinstance(victims, list), f"{said}; _victims gave {show(victims)}", "a list of requests, or None", hint)
        victims = names(victims)
    expect_equal(victims, expected, f"{said}: those who have to go", hint)
    same = names(scheduler.running) == [name for name, *_ in running] and scheduler.kv.pool.num_free == free
    expect(same, f"{said}; _victims has changed who runs, or the pool", "it to say whom, and to change nothing", hint=1)


def check_saved_list(Scheduler: Any) -> None:
    expect_attributes(Scheduler, "schedule", "_schedule_running")
    three = [("ana", 4, 8), ("bo", 4, 8), ("cy", 4, 8)]
    serve(Scheduler, three, 5, "Ana, Bo and Cy (4 tokens each, 8 to come) run in 5 blocks of 4")
    serve(Scheduler, [("ana", 8, 4), ("bo", 8, 4)], 4, "Ana and Bo (8 tokens each, 4 to come) run in 4 blocks of 4")
    serve(Scheduler, [("ana", 3, 6), ("bo", 3, 2)], 9, "Ana and Bo run, with room for both")
    dice = random.Random(4)
    for trace in range(40):
        people = [(f"r{i}", dice.randint(1, 10), dice.randint(1, 9)) for i in range(dice.randint(2, 8))]
        serve(Scheduler, people, dice.randint(5, 9), f"requests by dice (trace {trace}) in a small pool")


def serve(Scheduler: Any, people: Sequence[tuple[str, int, int]], num_blocks: int, said: str) -> None:
    """Serve all of them with a counter as the model, and audit after every step."""
    scheduler = scheduler_of(Scheduler, num_blocks, seats=4, watermark=0)
    requests = {name: new_request(name, i, prompt, output) for i, (name, prompt, output) in enumerate(people)}
    for request in requests.values():
        scheduler.add(request)
    unfinished = dict(requests)
    for step in range(1, 400):
        if not unfinished:
            return
        running = names(scheduler.running)
        try:
            plan = scheduler.schedule()
        except (IndexError, RuntimeError, ValueError) as error:
            raised = f"{said}; in step {step}, schedule() raised {type(error).__name__}"
            expect(False, f"{raised}, with {show(running)} running", "the step to be planned", hint=2)
        both = sorted(set(plan.preempted) & set(plan.num_scheduled_tokens))
        now = f"{said}; step {step}"
        said_so = f"{now} pushed {', '.join(both)} out, and plans tokens for {', '.join(both)}"
        expect(not both, said_so, "whoever is pushed out to compute nothing in that step", hint=1)
        still = [name for name in running if name not in plan.preempted]
        silent = [name for name in still if name not in plan.num_scheduled_tokens]
        expect(
            not silent, f"{now} has no token for {', '.join(silent)}, who runs", "one for everybody who runs", hint=3
        )
        expect(len(plan.preempted) < max(2, len(running)), f"{now} pushed {show(plan.preempted)} out", "fewer", hint=2)
        for name, n in plan.num_scheduled_tokens.items():
            take_in(scheduler, unfinished, requests[name], n)
        try:
            check_integrity(scheduler, unfinished.values())
        except IntegrityError as finding:
            expect(False, f"{now}: the audit finds: {finding}", "sound books after every step", hint=1)
    expect(not unfinished, f"{said}; after 400 steps {', '.join(unfinished)} were not done", "all of them", hint=3)


def take_in(scheduler: Any, unfinished: dict[str, Request], request: Request, n: int) -> None:
    """The step is done: a request that has caught up gains a token, and leaves with its last one."""
    scheduler.commit(request, n)
    if request.num_uncomputed_tokens == 0:
        request.output_token_ids.append(0)
        if len(request.output_token_ids) == request.max_tokens:
            scheduler.finish(request)
            del unfinished[request.request_id]


def scheduler_of(
    Scheduler: Any, num_blocks: int, seats: int, budget: int = 64, *, watermark: int = 1, policy: Policy | None = None
) -> Any:
    """A scheduler of the learner's class; everything it stands on is labcore's own."""
    return Scheduler(
        KVCacheManager(BlockPool(num_blocks, SIZE), NoPrefixCache(SIZE)), max_num_seqs=seats,
        max_num_batched_tokens=budget, chunking=WholePrompts(0), preemption=Recompute(),
        policy=policy or FirstComeFirstServed(), watermark=watermark,
    )  # fmt: skip


def new_request(name: str, arrival: int, prompt: int, output: int = 4, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=output)
    return Request(name, [0] * prompt, params, arrival, output, seed=0, priority=priority)


def who(request: Any) -> Any:
    """A request's name; whatever else was given, as it is."""
    return getattr(request, "request_id", request)


def names(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


EXERCISES = (
    Exercise(
        id="04.queue",
        title="a queue that is never searched",
        minutes=8,
        difficulty=1,
        spec="`peek()` returns the most entitled of those who are present, and leaves it in the queue. Entries "
        "of people who are not present any more are thrown away when they surface. `pop()` returns the same one "
        "and takes it out. Neither goes over everybody who waits.",
        check=check_queue,
        passed="gives the most entitled first, passes over those who hung up, and asks the policy nothing",
        hints=(
            "The first entry of a heap is its smallest, `self._heap[0]`: a pair of key and request. To look is "
            "not to take.",
            "Whoever hung up is in the heap and not in `_present`. And a name may be used again: is it the same "
            "request?",
            "`pop` is `peek`, and then out of both: the heap and `_present`. The keys stand in the heap; nobody "
            "has to be asked for one again.",
        ),
        reference="scheduler.waiting_queue.WaitingQueue",
        methods=("peek", "pop"),
    ),
    Exercise(
        id="04.admission",
        title="admission",
        minutes=15,
        difficulty=2,
        spec="`_schedule_waiting(plan, budget, keep_watermark)` admits from the head of `self.waiting` while somebody "
        "waits, a seat is free and budget is left. It stops at the first request that doesn't fit (`_can_admit`) or may "
        "compute no token: nobody overtakes. Each one admitted has its tokens reserved, and makes the budget "
        "smaller.",
        check=check_admission,
        passed="lets people in, in order, as far as seats, budget and blocks go, and leaves the others in the queue",
        hints=(
            "Four questions, in this order: does anybody wait? Is there a seat? Is there budget? Does the first "
            "one fit? And every admission changes the answers.",
            "`peek` looks, `pop` takes: take only whom you let in. Then it is admitted, and its tokens are reserved. "
            "And hand `keep_watermark` on to `_can_admit`, who knows about the watermark.",
            "If the first in line can't come in, stop there. Those behind it may be smaller, and still have to wait.",
        ),
        reference="scheduler.scheduler.Scheduler",
        methods=("_schedule_waiting",),
    ),
    Exercise(
        id="04.aging",
        title="aging",
        minutes=12,
        difficulty=2,
        spec="`sort_key(request)` is a key that puts a smaller `priority` first, where `aging` steps of "
        "earlier `arrival_step` make up for one number of priority; equals go by `arrival`, then by `beam_id`. "
        "`can_preempt(waiting, running)` is true if the waiting one has a smaller priority number and is more "
        "entitled.",
        check=check_aging,
        passed="puts urgent ones first, lets waiting count, and never has equals push each other out",
        hints=(
            "A tuple makes a key: what counts most comes first, what decides between equals comes after it.",
            "Put both into one number, in steps: what is a priority worth, and when did it come? The key may "
            "depend on nothing that changes while the request waits.",
            "Two conditions for pushing somebody out: the number alone would throw out one that has aged into "
            "its seat, the key alone would let equals swing.",
        ),
        reference="scheduler.policy.PriorityWithAging",
        methods=("sort_key", "can_preempt"),
    ),
    Exercise(
        id="04.victims",
        title="victims",
        minutes=15,
        difficulty=3,
        spec="`_victims(urgent, missing)` returns the running requests that have to go so that urgent gets a "
        "seat and `missing` more blocks: the least entitled first, no more than needed, nobody whom it doesn't "
        "outrank, wherever they stand. [] if nobody has to go, None if that wouldn't do. A block comes free with the "
        "last of its owners (`kv.pool.refcount`). Nothing is changed.",
        check=check_victims,
        passed="names as few as it takes, from the end of the list, and nobody at all if it would be in vain",
        hints=(
            "`self.running` is sorted, most entitled first: walk it from its end. Only say whom; somebody else acts.",
            "Keep two counts of what is still needed, seats and blocks, and stop as soon as both are used up. "
            "How many seats are needed if some are free?",
            "Whoever is not outranked is passed over, even at the end of the list. The walk ends when enough is found, "
            "or with the list. Is enough found then? And which blocks come free: those that as many victims hold as "
            "they have owners.",
        ),
        reference="scheduler.scheduler.Scheduler",
        methods=("_victims",),
    ),
    BugHunt(
        id="04.saved_list",
        title="bug hunt: still on the list",
        minutes=15,
        difficulty=2,
        spec="Everybody who runs gets their tokens, most entitled first. Whoever finds no block takes it from "
        "the least entitled. Whoever has been pushed out computes nothing in this step.",
        check=check_saved_list,
        passed="40 runs by dice in small pools: nobody is pushed out and planned at once, nobody who runs is left out",
        hints=(
            "In which list does a victim still stand, and in which one not any more? Follow Cy through step 2 of "
            "the log.",
            "Somebody who was pushed out has lost all blocks. What does the loop do when it comes to them? And "
            "what, when the last one in the list is the very one who asks?",
            "A request knows its status. Ask it at the head of the loop, and again after every push; and go on "
            "with everybody who still runs.",
        ),
        reference="course.exercises.nb04.MendedScheduler",
        methods=("_schedule_running",),
        planted="course.exercises.nb04_planted.CopyingScheduler",
        seen_in="HabanaAI/vllm-fork#2247",
    ),
)
