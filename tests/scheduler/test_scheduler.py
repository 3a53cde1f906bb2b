"""The scheduler alone, with no model: who runs, who waits, who gives way, and that nothing is ever lost."""

import gc
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labcore.engine.invariants import check_integrity
from labcore.kvcache.blocks import BlockPool
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import NoPrefixCache
from labcore.request import Request, RequestStatus
from labcore.sampling_params import SamplingParams
from labcore.scheduler.chunking import ChunkedPrefill, WholePrompts
from labcore.scheduler.policy import FirstComeFirstServed, PriorityWithAging
from labcore.scheduler.preemption import Recompute
from labcore.scheduler.scheduler import Scheduler
from labcore.scheduler.waiting_queue import WaitingQueue


class Bench:
    """A scheduler whose model is a counter: a request that has caught up gains a token, and ends at max_tokens."""

    def __init__(self, *, num_blocks=16, block_size=4, max_num_seqs=8, budget=64, policy="fcfs", chunked=True, order=None,
                 aging=1000, watermark=0):
        pool = BlockPool(num_blocks, block_size, free_order=order)
        self.scheduler = Scheduler(
            KVCacheManager(pool, NoPrefixCache(block_size)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            chunking=ChunkedPrefill(max_partial_prefills=1000) if chunked else WholePrompts(max_num_seqs),
            preemption=Recompute(),
            policy=PriorityWithAging(aging) if policy == "priority" else FirstComeFirstServed(),
            watermark=watermark,
        )
        self.requests = {}
        self.finished = {}
        self.computed = {}
        self.arrivals = 0

    def add(self, name, prompt, output, priority=0):
        request = Request(
            name, list(range(prompt)), SamplingParams(max_tokens=output), self.arrivals, output, seed=0, priority=priority
        )
        self.arrivals += 1
        self.requests[name] = request
        self.computed[name] = 0
        self.scheduler.add(request)
        return request

    def step(self):
        plan = self.scheduler.schedule()
        self.compute(plan)
        return plan

    def compute(self, plan):
        for name, n in plan.num_scheduled_tokens.items():
            request = self.requests[name]
            self.computed[name] += n
            self.scheduler.commit(request, n)
            if request.num_uncomputed_tokens == 0:
                request.output_token_ids.append(len(request.output_token_ids))
                if len(request.output_token_ids) == request.max_tokens:
                    self.end(name)
        check_integrity(self.scheduler, self.requests.values())

    def end(self, name):
        request = self.requests.pop(name)
        self.scheduler.finish(request)
        self.finished[name] = request

    def run(self, limit=1000):
        for steps in range(limit):
            if not self.scheduler.has_unfinished_requests():
                return steps
            self.step()
        raise AssertionError(f"still unfinished after {limit} steps: {sorted(self.requests)}")


def test_admission_into_a_running_batch_and_finish_without_waiting_for_the_others():
    bench = Bench()
    bench.add("ana", 6, 8)
    assert bench.step().num_scheduled_tokens == {"ana": 6}
    bench.add("bo", 3, 2)
    assert bench.step().num_scheduled_tokens == {"ana": 1, "bo": 3}
    assert bench.step().num_scheduled_tokens == {"ana": 1, "bo": 1}
    assert "bo" in bench.finished and bench.step().num_scheduled_tokens == {"ana": 1}


def test_preemption_takes_the_youngest_when_blocks_run_out_and_it_comes_back_first():
    bench = Bench(num_blocks=4, block_size=4)
    bench.add("ana", 7, 6)
    bench.add("bo", 7, 4)
    bench.add("cy", 2, 2)
    bench.step()
    assert bench.step().preempted == []
    assert bench.step().preempted == ["bo"]
    bo = bench.requests["bo"]
    assert bo.status is RequestStatus.WAITING and len(bo.output_token_ids) == 2 and bo.num_computed_tokens == 0
    assert [r.request_id for r in bench.scheduler.waiting] == ["bo", "cy"]
    bench.run()
    assert list(bench.finished) == ["ana", "bo", "cy"]
    assert bo.output_token_ids == [0, 1, 2, 3] and bo.num_preemptions == 1


def test_preemption_and_admission_never_share_a_step():
    bench = Bench(num_blocks=4, block_size=4)
    bench.add("ana", 8, 6)
    bench.add("bo", 8, 6)
    bench.step()
    bench.add("cy", 1, 1)
    plan = bench.step()
    assert plan.preempted == ["bo"] and plan.num_scheduled_tokens == {"ana": 1}


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("chunked", [True, False])
def test_chunked_prefill_serves_prompts_longer_than_any_budget_and_never_exceeds_it(budget, chunked):
    bench = Bench(budget=budget, chunked=chunked, num_blocks=32)
    for i in range(5):
        bench.add(f"r{i}", 5 + 4 * i, 3)
    while bench.scheduler.has_unfinished_requests():
        assert 0 < bench.step().num_tokens <= budget
    assert all(len(request.output_token_ids) == 3 for request in bench.finished.values())


def test_whole_prompts_wait_for_a_step_with_room_for_all_of_them():
    bench = Bench(budget=20, chunked=False, max_num_seqs=4)
    bench.add("ana", 12, 2)
    bench.add("bo", 12, 2)
    assert bench.step().num_scheduled_tokens == {"ana": 12}
    assert bench.step().num_scheduled_tokens == {"ana": 1, "bo": 12}


def test_whole_prompts_that_decodes_could_starve_are_cut():
    bench = Bench(budget=8, chunked=False, max_num_seqs=4)
    bench.add("ana", 2, 20)
    bench.step()
    bench.add("bo", 8, 1)
    assert bench.step().num_scheduled_tokens == {"ana": 1, "bo": 7}
    assert bench.step().num_scheduled_tokens == {"ana": 1, "bo": 1}


def test_decodes_get_their_token_before_any_prompt_does():
    """A more entitled request in the middle of its prompt leaves a token for each who decodes."""
    bench = Bench(num_blocks=64, budget=8, policy="priority")
    for name in ("ana", "bo", "cy"):
        bench.add(name, 2, 20, priority=5)
    bench.step()
    bench.add("long", 40, 2, priority=0)
    for _ in range(3):
        bench.step()
    assert bench.step().num_scheduled_tokens == {"long": 5, "ana": 1, "bo": 1, "cy": 1}


def test_chunked_prefill_limits_partial_prefills_and_short_prompts_overtake_a_long_one():
    bench = Bench(num_blocks=128, budget=16)
    bench.scheduler.chunking = ChunkedPrefill(max_partial_prefills=2, long_prefill_threshold=4)
    for name, prompt in (("long", 30), ("other", 30), ("third", 30)):
        bench.add(name, prompt, 2)
    assert bench.step().num_scheduled_tokens == {"long": 4, "other": 4}
    bench = Bench(num_blocks=128, budget=16)
    bench.scheduler.chunking = ChunkedPrefill(max_partial_prefills=2, long_prefill_threshold=8)
    bench.add("long", 60, 2)
    bench.add("short", 6, 2)
    assert bench.step().num_scheduled_tokens == {"long": 8, "short": 6}
    bench.run()
    assert list(bench.finished) == ["short", "long"]


@pytest.mark.parametrize("prompt", range(1, 14))
def test_preemption_is_not_needed_in_a_pool_that_just_holds_a_request(prompt):
    """Case: whether one more token fits was asked on the wrong side of the block's edge. Its last token needs no KV."""
    bench = Bench(num_blocks=-(-(prompt + 7) // 4), block_size=4, watermark=1)
    request = bench.add("r", prompt, 8)
    assert bench.run() == 8 and request.num_preemptions == 0 and bench.computed["r"] == prompt + 7


def test_requests_of_any_lengths_share_every_step_and_compute_each_token_once():
    """Case: requests were grouped by length, and whoever was not in the chosen group was preempted."""
    bench = Bench(num_blocks=100, block_size=16, budget=200)
    bench.add("ana", 120, 60)
    bench.add("bo", 50, 60)
    for _ in range(50):
        bench.step()
    bench.add("cy", 51, 60)
    assert bench.step().num_scheduled_tokens == {"ana": 1, "bo": 1, "cy": 51}
    assert bench.step().num_scheduled_tokens == {"ana": 1, "bo": 1, "cy": 1}
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert bench.computed == {"ana": 120 + 59, "bo": 50 + 59, "cy": 51 + 59}


def test_admission_of_equal_requests_is_in_order_of_arrival():
    bench = Bench(max_num_seqs=2, num_blocks=64)
    for name in "hgfedcba":
        bench.add(name, 4, 3)
    bench.run()
    assert "".join(bench.finished) == "hgfedcba"


def test_priority_of_a_smaller_number_is_admitted_first_and_preempted_last():
    bench = Bench(num_blocks=4, block_size=4, policy="priority")
    bench.add("later", 7, 6, priority=5)
    bench.step()
    bench.add("urgent", 7, 4, priority=1)
    bench.add("never mind", 2, 2, priority=9)
    assert "urgent" in bench.step().num_scheduled_tokens
    preempted = []
    while "urgent" not in bench.finished:
        preempted += bench.step().preempted
    assert preempted == ["later"]
    admitted = bench.step().num_scheduled_tokens
    assert list(admitted)[0] == "later" and bench.requests["later"].num_preemptions == 1
    bench.run()


def test_preemption_for_priority_takes_the_slot_of_the_last_in_order_and_never_of_an_equal():
    """Case: all sequence slots are taken, blocks are plenty."""
    bench = Bench(num_blocks=1000, max_num_seqs=2, policy="priority")
    bench.add("one", 4, 50, priority=10)
    bench.add("two", 4, 50, priority=10)
    for _ in range(5):
        bench.step()
    bench.add("urgent", 8, 4, priority=0)
    plan = bench.step()
    assert plan.preempted == ["two"] and plan.num_scheduled_tokens == {"urgent": 8, "one": 1}
    bench.add("equal", 8, 4, priority=10)
    bench.run()
    preemptions = {name: request.num_preemptions for name, request in bench.finished.items()}
    assert preemptions == {"urgent": 0, "one": 0, "two": 1, "equal": 0}


def test_preemption_for_priority_takes_blocks_only_if_that_admits_the_urgent_one():
    bench = Bench(num_blocks=8, block_size=4, policy="priority")
    bench.add("ana", 15, 10, priority=1)
    bench.add("bo", 15, 10, priority=5)
    bench.step()
    bench.add("too big for bo's share", 28, 2, priority=2)
    assert bench.step().preempted == []
    bench.add("fits", 12, 2, priority=2)
    while bench.requests["bo"].num_preemptions == 0:
        bench.step()
    assert "ana" in bench.requests and bench.requests["ana"].num_preemptions == 0
    bench.run()
    assert len(bench.finished) == 4


def boundary(num_prompt_tokens, *, watermark=0, num_blocks=8):
    """ana (0) is at the end of her 4 blocks and needs a fifth in this step, victim (5) holds 3, 1 is free; urgent (1) comes."""
    bench = Bench(num_blocks=num_blocks, block_size=4, policy="priority", watermark=watermark)
    bench.add("ana", 15, 20, priority=0)
    bench.add("victim", 10, 20, priority=5)
    bench.step()
    bench.step()
    assert bench.requests["ana"].table.blocks_needed(1) == 1 and bench.scheduler.kv.pool.num_free == num_blocks - 7
    bench.add("urgent", num_prompt_tokens, 3, priority=1)
    return bench


def test_preemption_for_priority_counts_the_blocks_that_running_requests_take_in_the_same_step():
    """Urgent needs all that is free and all that the victim holds. Both were preempted, and only ana ran on."""
    bench = boundary(num_prompt_tokens=16)
    plan = bench.step()
    assert plan.preempted == [] and plan.num_scheduled_tokens == {"ana": 1, "victim": 1}


def test_preemption_for_priority_admits_the_urgent_one_in_the_same_step():
    bench = boundary(num_prompt_tokens=12)
    plan = bench.step()
    assert plan.preempted == ["victim"] and plan.num_scheduled_tokens == {"ana": 1, "urgent": 12}


@pytest.mark.parametrize("num_blocks, preempted", [(9, []), (10, ["victim"])])
def test_preemption_for_priority_leaves_the_watermark_so_that_its_work_is_not_lost_a_step_later(num_blocks, preempted):
    """Beside ana's fifth block, urgent's 3 and one for each of the two, 10 in all; with 9 it would be pushed out soon."""
    bench = boundary(num_prompt_tokens=12, watermark=1, num_blocks=num_blocks)
    assert bench.step().preempted == preempted
    while preempted and "urgent" not in bench.finished:
        assert bench.step().preempted == []


def test_preemption_for_priority_waits_for_a_step_with_budget_for_the_urgent_one():
    """A more entitled prompt takes the whole budget: to give up a slot then would let two requests stand still, not one."""
    bench = Bench(num_blocks=64, max_num_seqs=2, budget=20, policy="priority", chunked=False)
    bench.add("victim", 4, 20, priority=5)
    bench.step()
    bench.add("long", 30, 2, priority=0)
    bench.add("urgent", 10, 2, priority=1)
    plan = bench.step()
    assert plan.preempted == [] and plan.num_scheduled_tokens == {"long": 19, "victim": 1}
    plan = bench.step()
    assert plan.preempted == [] and plan.num_scheduled_tokens == {"long": 11, "victim": 1}
    plan = bench.step()
    assert plan.preempted == ["victim"] and plan.num_scheduled_tokens == {"long": 1, "urgent": 10}


def test_preemption_for_priority_considers_every_running_request_that_the_waiting_one_outranks():
    """W (1, key 45) outranks A (5, key 50), not B (0, key 60), who stands last: only the last of `running` was asked."""
    bench = Bench(num_blocks=100, max_num_seqs=2, policy="priority", aging=10)
    for name, priority, arrival_step in (("A", 5, 0), ("B", 0, 60), ("W", 1, 35)):
        bench.scheduler._step = arrival_step
        bench.add(name, 4, 9, priority)
        plan = bench.step()
    assert plan.preempted == ["A"] and plan.num_scheduled_tokens == {"W": 4, "B": 1}


def test_preemption_for_priority_takes_no_block_from_one_that_is_not_outranked():
    """B (0, key 60) stands behind W (1, key 45), is not outranked, and needs a block in this step: it keeps its turn."""
    bench = Bench(num_blocks=4, block_size=4, policy="priority", aging=10)
    for name, priority, arrival_step, prompt in (("A", 5, 0, 4), ("B", 0, 60, 3)):
        bench.scheduler._step = arrival_step
        bench.add(name, prompt, 9, priority)
        bench.step()
    bench.step()  # A has 2 blocks, B fills its first one, 1 is free
    bench.scheduler._step = 35
    bench.add("W", 12, 2, priority=1)
    plan = bench.step()
    assert plan.preempted == [] and plan.num_scheduled_tokens == {"A": 1, "B": 1}


def test_preemption_in_vain_is_spared_those_who_hold_too_few_blocks_for_the_one_that_lacks_them():
    """The rest of a prompt lacks more blocks than are free and all behind it hold: it steps back, and they go on."""
    bench = Bench(num_blocks=18, block_size=4)
    bench.scheduler.chunking = ChunkedPrefill(long_prefill_threshold=4)
    bench.add("first", 4, 30)
    bench.step()
    bench.scheduler.chunking.long_prefill_threshold = 1
    bench.add("long", 60, 2)
    bench.add("behind", 2, 30)
    bench.step()
    while len(bench.requests["first"].table.blocks) < 4:
        assert bench.step().preempted == []
    bench.scheduler.chunking.long_prefill_threshold = 0
    long, behind = bench.requests["long"], bench.requests["behind"]
    lacking = long.table.blocks_needed(long.num_uncomputed_tokens) - bench.scheduler.kv.pool.num_free
    assert lacking > len(behind.table.blocks)
    plan = bench.step()
    assert plan.preempted == ["long"] and plan.num_scheduled_tokens == {"first": 1, "behind": 1}
    bench.run()


def test_preemption_for_a_slot_never_swings_between_equals():
    """Case: one slot, equal priorities; then one truly urgent request."""
    bench = Bench(num_blocks=100, max_num_seqs=1, policy="priority")
    bench.add("r2", 4, 30, priority=5)
    bench.step()
    bench.add("r1", 4, 30, priority=5)
    bench.step()
    bench.add("urgent", 4, 2, priority=0)
    steps = bench.run()
    assert {name: r.num_preemptions for name, r in bench.finished.items()} == {"urgent": 0, "r2": 1, "r1": 0}
    assert steps <= 30 + 30 + 2 + 5


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=2, max_size=12),
    max_num_seqs=st.integers(1, 3),
    aging=st.sampled_from([1, 3, 1000]),
)
@settings(max_examples=40)
def test_preemption_with_blocks_to_spare_is_never_more_frequent_than_urgent_arrivals(
    arrivals, max_num_seqs, aging
):
    """An arrival is (priority, steps since the one before). However long somebody has waited: never for an equal."""
    bench = Bench(num_blocks=1000, max_num_seqs=max_num_seqs, policy="priority", aging=aging)
    asked = []
    for i, (priority, wait) in enumerate(arrivals):
        for _ in range(wait):
            if bench.requests:
                bench.step()
        asked.append(bench.add(f"r{i}", 3, 9, priority))
    bench.run()
    for i, request in enumerate(asked):
        assert request.num_preemptions <= sum(priority < arrivals[i][0] for priority, _ in arrivals[i + 1 :])


@pytest.mark.parametrize("aging", [3, 10, 40])
def test_aging_prevents_starvation_under_a_stream_of_urgent_requests(aging):
    """The bound: priority 2 is overtaken by priority 0 only if that arrives less than 2 * aging steps later."""
    bench = Bench(num_blocks=64, max_num_seqs=1, policy="priority", aging=aging)
    bench.add("busy", 4, 2, priority=0)
    bench.step()
    patient = bench.add("patient", 4, 2, priority=2)
    for i in range(4 * aging):
        bench.add(f"urgent{i}", 4, 1, priority=0)
        bench.step()
    overtakers = [r for r in bench.finished.values() if r.arrival > patient.arrival]
    before_patient = overtakers[: list(bench.finished).index("patient") - 1]
    assert before_patient and all(r.arrival_step - patient.arrival_step < 2 * aging for r in before_patient)
    assert "patient" in bench.finished


@pytest.mark.parametrize("watermark, expected", [(0, True), (1, False)])
def test_watermark_keeps_a_newcomer_from_being_preempted_within_a_block(watermark, expected):
    bench = Bench(num_blocks=12, block_size=8, watermark=watermark, max_num_seqs=16)
    thrashed = False
    admitted = {}
    for step in range(200):
        if step % 3 == 0:
            bench.add(f"r{step}", 8, 17)
        plan = bench.step()
        for request in bench.scheduler.running:
            admitted.setdefault((request.request_id, request.num_preemptions), step)
        for name in plan.preempted:
            thrashed |= step - admitted[name, bench.requests[name].num_preemptions - 1] < 8
    assert thrashed == expected


def test_admission_leaves_the_blocks_that_a_half_computed_prompt_still_needs():
    bench = Bench(num_blocks=8, block_size=4, budget=4)
    bench.add("long", 24, 2)
    bench.step()
    bench.add("short", 12, 2)
    while "long" not in bench.finished:
        assert bench.step().preempted == []


def test_fcfs_ignores_priorities():
    bench = Bench(max_num_seqs=1)
    bench.add("first", 4, 2, priority=9)
    bench.add("second", 4, 2, priority=0)
    bench.run()
    assert list(bench.finished) == ["first", "second"]


def test_admission_of_a_preempted_request_comes_before_all_later_arrivals():
    """Case: new short requests arrive at every step after the preemption; none may overtake."""
    bench = Bench(num_blocks=8, block_size=4)
    bench.add("old", 4, 24)
    bench.add("ana", 15, 10)
    while bench.requests["ana"].num_preemptions == 0:
        bench.step()
    admitted = []
    for i in range(30):
        bench.add(f"late{i}", 4, 3)
        before = {r.request_id for r in bench.scheduler.running}
        bench.step()
        admitted += [r.request_id for r in bench.scheduler.running if r.request_id not in before]
    assert next(name for name in admitted if name != "old") == "ana"
    bench.run()
    assert len(bench.finished) == 32


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("prompt", [5, 16])
def test_preemption_at_any_boundary_loses_and_repeats_no_token(prompt, length):
    if length <= prompt:
        pytest.skip("the prompt alone is longer")
    bench = Bench(num_blocks=8, block_size=16)
    request = bench.add("r", prompt, 40)
    while request.num_tokens < length:
        bench.step()
    made = list(request.output_token_ids)
    bench.scheduler.roll_back([request])
    check_integrity(bench.scheduler, bench.requests.values())
    plan = bench.step()
    assert plan.num_scheduled_tokens == {"r": length} and request.output_token_ids == [*made, len(made)]
    bench.run()
    assert request.output_token_ids == list(range(40))


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "mid-prefill"])
def test_finish_takes_a_request_out_in_any_state(state):
    bench = Bench(num_blocks=4, block_size=4, budget=4 if state == "mid-prefill" else 64)
    bench.add("ana", 8 if state != "mid-prefill" else 3, 6)
    bench.add("bo", 7, 6)
    bench.add("cy", 8, 2)
    if state != "waiting":
        bench.step()
    if state == "preempted":
        while not bench.requests["bo"].num_preemptions:
            bench.step()
    victim = "ana" if state == "running" else "bo"
    if state == "mid-prefill":
        assert 0 < bench.requests["bo"].num_computed_tokens < 7
    bench.end(victim)
    check_integrity(bench.scheduler, bench.requests.values())
    bench.run()
    assert len(bench.finished) == 3 and bench.scheduler.kv.pool.num_free == 4


def test_an_id_may_be_used_again_after_its_request_is_gone():
    bench = Bench(max_num_seqs=1)
    bench.add("x", 4, 2)
    first = bench.add("ana", 4, 2)
    bench.end("ana")
    again = bench.add("ana", 4, 2)
    bench.run()
    assert first.output_token_ids == [] and again.output_token_ids == [0, 1]


@pytest.mark.parametrize("behind_whom", ["front", "back"])
def test_abort_of_waiting_requests_frees_them_and_their_heap_entries(behind_whom):
    """Queued and forked requests are aborted while one waits, in front of them or behind: their entries never surfaced."""
    bench = Bench(max_num_seqs=1, policy="priority", aging=10**6)
    running = bench.add("running", 4, 9)
    bench.step()
    bench.add("waits", 4, 2, priority=0 if behind_whom == "front" else 2)
    asked = []
    for i in range(500):
        asked.append(weakref.ref(bench.add(f"queued{i}", 4, 2, priority=1)))
        child = running.fork(f"forked{i}", arrival=bench.arrivals)
        bench.arrivals += 1
        bench.scheduler.fork(child, running)
        bench.requests[child.request_id] = child
        asked.append(weakref.ref(child))
    del child
    for name in [name for name in bench.requests if name not in ("running", "waits")]:
        bench.end(name)
        bench.finished.clear()
    gc.collect()
    assert sum(ref() is not None for ref in asked) <= 1
    assert len(bench.scheduler.waiting) == 1 and len(bench.scheduler.waiting._heap) <= 2
    bench.run()
    assert {"running", "waits"} <= set(bench.finished)


def test_abort_costs_the_same_however_many_requests_wait():
    """Each entry is moved a bounded number of times: a rebuild of n entries follows n / 2 aborts."""
    moved = []

    class CountingQueue(WaitingQueue):
        def discard(self, request):
            before = self._heap
            super().discard(request)
            moved.append(len(self._heap) if self._heap is not before else 0)

    queue = CountingQueue(FirstComeFirstServed())
    crowd = [Request(f"r{i}", [0], SamplingParams(), i, 1, seed=0) for i in range(10_000)]
    for request in crowd:
        queue.push(request)
    order = random.Random(0).sample(crowd, len(crowd))
    for request in order[:-1]:
        queue.discard(request)
        assert len(queue._heap) <= 2 * max(1, len(queue))
    assert sum(moved) <= len(crowd) and queue.pop() is order[-1]


class Before:
    """What a scheduler knew before a step, and what must be true of the plan that it made. No block has two owners here."""

    def __init__(self, scheduler):
        self.scheduler, self.budget, self.free = scheduler, scheduler.max_num_batched_tokens, scheduler.kv.pool.num_free
        self.ran = list(scheduler.running)
        self.held = {r.request_id: len(r.table.blocks) for r in self.ran}
        self.wants = {r.request_id: r.table.blocks_needed(min(r.num_uncomputed_tokens, self.budget)) for r in self.ran}
        self.decoding = {r.request_id for r in self.ran if r.num_uncomputed_tokens == 1}
        self.num_uncomputed = sum(r.num_uncomputed_tokens for r in self.ran)
        self.head = scheduler.waiting.peek() if scheduler.waiting else None
        self.outranked = [r for r in self.ran if self.head is not None and scheduler.policy.can_preempt(self.head, r)]

    def head_fits_beside(self, staying):
        """Whether the head finds a slot and blocks if just these go on.

        Those that it doesn't outrank keep all that they still need, the others what they need in this step.
        """
        size, watermark = self.scheduler.kv.pool.block_size, self.scheduler.watermark
        keeping = [r for r in staying if r not in self.outranked]
        reserved = sum(-(-r.num_tokens // size) - self.held[r.request_id] for r in keeping)
        reserved += watermark * (len(keeping) + 1) if keeping else 0
        reserved += sum(self.wants[r.request_id] for r in staying if r in self.outranked)
        freed = sum(self.held[r.request_id] for r in self.ran if r not in staying)
        has_slot = len(staying) < self.scheduler.max_num_seqs
        return has_slot and -(-self.head.num_tokens // size) + reserved <= self.free + freed

    def check(self, plan):
        assert 0 < plan.num_tokens <= self.budget
        assert not set(plan.preempted) & set(plan.num_scheduled_tokens)
        preempted = [r for r in self.ran if r.request_id in plan.preempted]
        if preempted and self.head is not None and self.head.status is RequestStatus.RUNNING:
            self.check_urgent(plan, preempted)
        elif preempted:
            self.check_short_of_blocks(preempted)
        else:
            self.check_admission(plan)
        if self.budget > len(self.ran):
            left_out = self.decoding - set(plan.preempted) - {n for n, m in plan.num_scheduled_tokens.items() if m == 1}
            assert not left_out, "who decodes gains a token in every step"

    def check_urgent(self, plan, preempted):
        """Requests were preempted for the head of the queue: it computes, and it needed them all, and might take them."""
        entitled = self.scheduler.policy.sort_key
        assert self.head.request_id in plan.num_scheduled_tokens, "preempted for one that computes nothing"
        short = sum(self.wants.values()) > self.free
        assert short or all(r in self.outranked for r in preempted), "preempted for one that doesn't outrank it"
        last = min(preempted, key=entitled)
        assert short or not self.head_fits_beside([last, *(r for r in self.ran if r not in preempted)]), "one too many"

    def check_short_of_blocks(self, preempted):
        """Running requests were short of blocks: each that stepped back had none left, or was behind one that needed them."""
        entitled = self.scheduler.policy.sort_key
        taken = sum(len(r.table.blocks) - self.held[r.request_id] for r in self.ran if r not in preempted)
        for request in preempted:
            wanted = taken + self.wants[request.request_id]
            assert wanted > self.free, "preempted in vain"
            behind = [r for r in self.ran if entitled(r) > entitled(request)]
            if any(r not in preempted for r in behind):
                assert wanted > self.free + sum(self.held[r.request_id] for r in behind), "stepped back before one behind it"

    def check_admission(self, plan):
        """Nobody was preempted: whoever could come in did, in order, and so did one that might have preempted."""
        entitled, waiting = self.scheduler.policy.sort_key, self.scheduler.waiting
        admitted = [r for r in self.scheduler.running if r not in self.ran]
        if admitted and waiting:
            assert max(map(entitled, admitted)) < min(map(entitled, waiting)), "somebody was overtaken"
        if self.outranked and self.head not in admitted and self.budget >= self.num_uncomputed + self.head.num_tokens:
            assert not self.head_fits_beside([r for r in self.ran if r not in self.outranked]), "may preempt, and waits"


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, broken steps and ordinary ones, in tiny pools, under both policies."""

    @initialize(
        num_blocks=st.integers(6, 14),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked=st.booleans(),
        aging=st.sampled_from([1, 5, 1000]),
        watermark=st.integers(0, 1),
        seed=st.integers(0, 99),
    )
    def start(self, num_blocks, max_num_seqs, budget, policy, chunked, aging, watermark, seed):
        order = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.bench = Bench(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, policy=policy, chunked=chunked, order=order,
            aging=aging, watermark=watermark,
        )

    @rule(prompt=st.integers(1, 14), output=st.integers(1, 10), priority=st.integers(0, 3))
    def arrive(self, prompt, output, priority):
        self.bench.add(f"r{self.bench.arrivals}", prompt, output, priority)

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.bench.end(data.draw(st.sampled_from(sorted(self.bench.requests))))

    @precondition(lambda self: self.bench.requests)
    @rule()
    def step(self):
        bench, scheduler = self.bench, self.bench.scheduler
        before = Before(scheduler)
        plan = scheduler.schedule()
        before.check(plan)
        bench.compute(plan)

    @precondition(lambda self: self.bench.scheduler.running)
    @rule(data=st.data())
    def lose_one(self, data):
        """A step in which only one was computed broke off: it waits, however entitled it is, and the others run on."""
        self.bench.scheduler.roll_back([data.draw(st.sampled_from(self.bench.scheduler.running))])

    @precondition(lambda self: self.bench.scheduler.running)
    @rule()
    def break_off(self):
        bench = self.bench
        plan = bench.scheduler.schedule()
        bench.scheduler.roll_back([bench.requests[name] for name in plan.num_scheduled_tokens])

    @invariant()
    def every_request_is_in_one_place_and_every_block_has_its_owners(self):
        if hasattr(self, "bench"):
            check_integrity(self.bench.scheduler, self.bench.requests.values())

    @invariant()
    def the_heap_is_never_more_than_twice_as_long_as_the_queue(self):
        if hasattr(self, "bench"):
            assert len(self.bench.scheduler.waiting._heap) <= 2 * len(self.bench.scheduler.waiting)

    @invariant()
    def who_was_never_preempted_has_computed_each_token_once(self):
        for request in [*self.bench.requests.values(), *self.bench.finished.values()] if hasattr(self, "bench") else []:
            if request.num_preemptions == 0:
                assert self.bench.computed[request.request_id] == request.num_computed_tokens

    @invariant()
    def no_token_is_lost_or_repeated(self):
        for request in [*self.bench.requests.values(), *self.bench.finished.values()] if hasattr(self, "bench") else []:
            assert request.output_token_ids == list(range(len(request.output_token_ids)))

    def teardown(self):
        if hasattr(self, "bench"):
            tokens = sum(len(r.prompt_token_ids) + r.max_tokens for r in self.bench.requests.values())
            self.bench.run(limit=1000 + 2 * tokens)  # a budget of 1 takes a step for each token
            assert self.bench.scheduler.kv.pool.num_free == self.bench.scheduler.kv.pool.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.slow
def test_scheduler_keeps_every_invariant_for_a_hundred_thousand_steps():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(SchedulerMachine, settings=settings(
        max_examples=1000, stateful_step_count=100, deadline=None, derandomize=True))


def test_budget_below_the_number_of_decodes_serves_the_first_in_order():
    """It went to the last in line, for whom it had been kept; and if that one found no block, to nobody at all."""
    bench = Bench(num_blocks=3, budget=8, chunked=False)
    bench.add("first", 4, 8)
    bench.add("second", 4, 8)
    assert bench.step().num_scheduled_tokens == {"first": 4, "second": 4}
    bench.scheduler.max_num_batched_tokens = 1
    order = []
    while bench.scheduler.has_unfinished_requests():
        plan = bench.step()
        assert plan.num_tokens == 1
        order += plan.num_scheduled_tokens
    assert order == sorted(order), "first has all of the tokens until it is done"
