"""Real request logs through the scheduler, with a cost model for a GPU: nothing is lost, and every invariant holds.

The two public traces are read where they lie beside the project, in ../shared/traces; the course's own log always is.
"""

from collections import deque
from pathlib import Path

import pytest

from labcore.engine.invariants import check_integrity
from labcore.kvcache.blocks import BlockPool
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import NoPrefixCache
from labcore.request import Request
from labcore.sampling_params import SamplingParams
from labcore.scheduler.chunking import ChunkedPrefill, WholePrompts
from labcore.scheduler.policy import FirstComeFirstServed, PriorityWithAging
from labcore.scheduler.preemption import Recompute
from labcore.scheduler.scheduler import Scheduler
from labcore.workload.traces import CHAT_TRACE, load_trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
TRACES = {
    "chat": CHAT_TRACE,
    "azure": SHARED / "AzureLLMInferenceTrace_conv.csv",
    "mooncake": SHARED / "mooncake_conversation_head3000.jsonl",
}
BLOCK_SIZE = 16


def seconds_of_a_step(num_tokens: int, kv_tokens: int) -> float:
    """An 8B model in bfloat16 on an A100: read the weights, compute the tokens, read the KV. Rough, never random."""
    return 16e9 / 1.5e12 + num_tokens * 16e9 / 150e12 + kv_tokens * 131_072 / 1.5e12


class Replay:
    """A log served by the scheduler alone; the clock moves by the cost model, and requests arrive by the clock."""

    def __init__(self, log, *, num_blocks, policy, chunked, max_num_seqs=64, budget=4096, audit_every=200):
        self.scheduler = Scheduler(
            KVCacheManager(BlockPool(num_blocks, BLOCK_SIZE), NoPrefixCache(BLOCK_SIZE)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            chunking=ChunkedPrefill() if chunked else WholePrompts(max_num_seqs),
            preemption=Recompute(),
            policy=policy,
        )
        self.log = log
        self.budget = budget
        self.audit_every = audit_every
        self.now = 0.0
        self.computed = 0
        self.requests = {}
        self.finished = []
        self.first_admitted = []

    def run(self):
        arriving = deque(enumerate(self.log))
        step = 0
        while arriving or self.requests:
            if not self.requests:
                self.now = max(self.now, arriving[0][1].arrival)
            while arriving and arriving[0][1].arrival <= self.now:
                self.arrive(*arriving.popleft())
            plan = self.scheduler.schedule()
            assert 0 < plan.num_tokens <= self.budget
            assert not set(plan.preempted) & set(plan.num_scheduled_tokens)
            self.take_in(plan)
            step += 1
            if step % self.audit_every == 0:
                check_integrity(self.scheduler, self.requests.values())
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks
        return step

    def arrive(self, i, line):
        params = SamplingParams(max_tokens=line.output_tokens)
        request = Request(
            f"r{i}", [0] * line.prompt_tokens, params, i, line.output_tokens, seed=0, priority=i % 5 != 0,
            arrival_time=line.arrival,
        )  # fmt: skip
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def take_in(self, plan):
        scheduled = [self.requests[name] for name in plan.num_scheduled_tokens]
        kv_tokens = sum(request.table.num_tokens for request in scheduled)
        for request in scheduled:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = self.now
                self.first_admitted.append(request.arrival)
        self.now += seconds_of_a_step(plan.num_tokens, kv_tokens)
        self.computed += plan.num_tokens
        for request in scheduled:
            self.scheduler.commit(request, plan.num_scheduled_tokens[request.request_id])
            if request.num_uncomputed_tokens == 0:
                request.output_token_ids.append(len(request.output_token_ids))
                if request.metrics.first_token_time is None:
                    request.metrics.first_token_time = self.now
                if len(request.output_token_ids) == request.max_tokens:
                    request.metrics.finished_time = self.now
                    self.scheduler.finish(self.requests.pop(request.request_id))
                    self.finished.append(request)


def read(name, limit):
    if not TRACES[name].is_file():
        pytest.skip(f"the {name} trace doesn't lie in ../shared/traces")
    return load_trace(TRACES[name])[:limit]


def check_nothing_lost(replay, log):
    assert len(replay.finished) == len(log)
    for request in replay.finished:
        assert request.output_token_ids == list(range(log[request.arrival].output_tokens))


@pytest.mark.parametrize("chunked", [False, True], ids=["whole prompts", "chunks"])
@pytest.mark.parametrize("name", TRACES)
def test_trace_is_served_in_order_of_arrival_and_nothing_is_lost(name, chunked):
    log = read(name, 150)
    blocks = max(1_800, 2 + max(-(-(r.prompt_tokens + r.output_tokens) // BLOCK_SIZE) for r in log))
    replay = Replay(log, num_blocks=blocks, policy=FirstComeFirstServed(), chunked=chunked)
    replay.run()
    check_nothing_lost(replay, log)
    assert replay.first_admitted == sorted(replay.first_admitted)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [FirstComeFirstServed(), PriorityWithAging(1000)], ids=["fcfs", "priority"])
@pytest.mark.parametrize("name", TRACES)
def test_trace_of_thousands_of_requests_keeps_every_invariant_under_memory_pressure(name, policy, record_property):
    """Figures are noted as test properties: seen with `pytest --junit-xml`, or with -s."""
    log = read(name, 2_000 if name != "mooncake" else 600)
    blocks = max(2_500, 2 + max(-(-(r.prompt_tokens + r.output_tokens) // BLOCK_SIZE) for r in log))
    replay = Replay(log, num_blocks=blocks, policy=policy, chunked=True)
    steps = replay.run()
    check_nothing_lost(replay, log)
    once = sum(r.prompt_tokens + r.output_tokens - 1 for r in log)
    waits = sorted(r.metrics.first_scheduled_time - r.arrival_time for r in replay.finished)
    figures = {
        "requests": len(log), "blocks": blocks, "steps": steps, "preemptions": replay.scheduler.num_preemptions,
        "computed twice": f"{replay.computed / once - 1:.2%}", "median wait": f"{waits[len(waits) // 2]:.1f} s",
    }  # fmt: skip
    for key, value in figures.items():
        record_property(key, value)
    print(f"\n{name}: {figures}")
    assert replay.computed >= once
    assert (replay.computed > once) == (replay.scheduler.num_preemptions > 0)
