"""Chunked prefill in the engine: whatever the budget, the pool and the company, a request says what it says alone."""

import random

import pytest
from engines import greedy, poisoned_llm, run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny

from labcore import LLM, BeamSearchParams, SamplingParams
from labcore.models import from_model

NUM_TOKENS = 10
BUDGETS = [1, 7, 16, 33, 64, 256]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def loaded(model):
    return from_model(model)


def flat_out(max_tokens=NUM_TOKENS, **options):
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **options})


def random_prompt(length, seed=0):
    dice = random.Random(seed)
    return [dice.randrange(1, 200) for _ in range(length)]


@pytest.fixture(scope="module")
def crowd():
    """64 prompts of 1 … 40 tokens; every second one begins like others do, so that a prefix cache has work."""
    dice, trunk = random.Random(8), random_prompt(40, seed=1)
    return [
        trunk[: dice.randint(1, 40)] if i % 2 else random_prompt(dice.randint(1, 40), seed=i + 2) for i in range(64)
    ]


@pytest.fixture(scope="module")
def expected(model, crowd):
    return [greedy(model, prompt, NUM_TOKENS) for prompt in crowd]


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
def test_chunked_prefill_of_64_requests_equals_transformers_at_every_budget(loaded, crowd, expected, budget, caching):
    llm = poisoned_llm(
        loaded, num_blocks=48, block_size=4, max_num_batched_tokens=budget, enable_prefix_caching=caching
    )
    llm.engine.scheduler.watermark = 0  # admit whoever fits now, so that growth must push somebody out
    for i, prompt in enumerate(crowd):
        llm.engine.add_request(f"r{i}", prompt, flat_out())
    schedule = llm.engine.scheduler.schedule

    def schedule_after_a_loss(budget):
        """Now and then the youngest loses what it has: with small budgets so few run that nobody would have to."""
        if llm.engine.scheduler._step % 67 == 10:
            llm.engine.scheduler.roll_back(llm.engine.scheduler.running[-1:])
        return schedule(budget)

    llm.engine.scheduler.schedule = schedule_after_a_loss
    done = run(llm.engine, limit=10_000)
    assert [done[f"r{i}"].outputs[0].token_ids for i in range(64)] == expected
    assert sum(output.metrics.num_preemptions for output in done.values()) > 0
    assert llm.engine.stats()["num_preemptions"] > 0 or budget < 33
    assert (llm.engine.stats()["prefix_cache_hits"] > 0) == caching


ASKED = [
    (random_prompt(length, seed=length), params)
    for length, params in [
        (1, flat_out()), (5, flat_out(3)), (16, flat_out()), (17, flat_out()), (33, flat_out(6)), (48, flat_out(4)),
        (9, flat_out(8, n=3, temperature=0.9, seed=5)), (31, flat_out(5, n=2, temperature=1.2, seed=6)),
        (20, flat_out(6, temperature=0.8, top_p=0.9, seed=7, repetition_penalty=1.3)),
        (13, BeamSearchParams(beam_width=3, max_tokens=6)), (32, BeamSearchParams(beam_width=2, max_tokens=5)),
    ]
]  # fmt: skip
ASKED += [(ASKED[5][0][:21] + [3, 1, 4], flat_out()), (ASKED[5][0], flat_out(7, n=2, temperature=0.7, seed=9))]


@pytest.fixture(scope="module")
def alone(loaded):
    """What each of ASKED says alone, in one piece, with room and without a cache."""
    said = []
    for prompt, params in ASKED:
        llm = LLM(loaded, num_blocks=64, block_size=4, enable_chunked_prefill=False, enable_prefix_caching=False)
        llm.engine.add_request("r", prompt, params)
        said.append(tokens(run(llm.engine)["r"]))
    return said


def tokens(output):
    return [completion.token_ids for completion in output.outputs]


ARRIVAL = st.tuples(st.integers(0, len(ASKED) - 1), st.integers(0, 4), st.integers(0, 60))
"""Which of ASKED, steps to wait before it, steps until somebody aborts it: most end before."""


MIX = {
    "arrivals": st.lists(ARRIVAL, min_size=1, max_size=9),
    "budget": st.sampled_from([*BUDGETS, 2, 3, 12]),
    "num_blocks": st.integers(26, 60),
    "caching": st.booleans(),
    "watermark": st.integers(0, 1),
    "max_partial": st.integers(1, 4),
    "threshold": st.sampled_from([0, 1, 5, 16]),
    "policy": st.sampled_from(["fcfs", "priority"]),
}


@pytest.mark.parametrize("examples", [12, pytest.param(250, marks=pytest.mark.slow)])
def test_chunked_prefill_mixed_with_forks_beams_preemption_caching_and_aborts_changes_no_token(loaded, alone, examples):
    settings(max_examples=examples)(given(**MIX)(mixed_company_changes_no_token))(loaded, alone)


@example(arrivals=[(9, 0, 99), (6, 1, 99), (12, 0, 99), (5, 2, 99), (10, 0, 99)], budget=7, num_blocks=26, caching=True,
         watermark=0, max_partial=2, threshold=5, policy="priority")  # fmt: skip
def mixed_company_changes_no_token(
    loaded, alone, arrivals, budget, num_blocks, caching, watermark, max_partial, threshold, policy
):
    engine = poisoned_llm(
        loaded, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget, enable_prefix_caching=caching,
        max_num_partial_prefills=max_partial, long_prefill_token_threshold=threshold, scheduling_policy=policy,
        max_num_seqs=6,
    ).engine  # fmt: skip
    engine.scheduler.watermark = watermark
    done, deadlines = {}, {}

    def step():
        done.update((o.request_id, o) for o in engine.step() if o.finished)
        engine.check_integrity()
        for name in [name for name, left in deadlines.items() if left == 0 and name in engine.request_ids()]:
            done[name] = engine.abort(name)
            engine.check_integrity()
        deadlines.update((name, left - 1) for name, left in deadlines.items())

    for i, (which, wait, patience) in enumerate(arrivals):
        for _ in range(wait):
            step()
        engine.add_request(f"r{i}", *ASKED[which], priority=i % 3)
        deadlines[f"r{i}"] = patience
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            break
        step()
    assert set(done) == {f"r{i}" for i in range(len(arrivals))} and engine.pool.num_free == num_blocks
    for i, (which, _, _) in enumerate(arrivals):
        for said, whole in zip(done[f"r{i}"].outputs, alone[which], strict=False):
            if said.finish_reason != "abort":
                assert said.token_ids == whole
            elif isinstance(ASKED[which][1], SamplingParams):
                assert said.token_ids == whole[: len(said.token_ids)]


@pytest.mark.parametrize("budget, length, first", [(32, 100, 4), (32, 96, 3), (32, 97, 4), (7, 8, 2), (1, 5, 5)])
def test_chunked_prefill_samples_nothing_before_the_last_chunk_and_then_one_token_a_step(loaded, model, budget, length, first):
    engine = poisoned_llm(loaded, num_blocks=64, block_size=4, max_num_batched_tokens=budget).engine
    prompt = random_prompt(length)
    engine.add_request("r", prompt, flat_out(5))
    events = [engine.step() for _ in range(first + 4)]
    assert [len(outputs) for outputs in events] == [0] * (first - 1) + [1] * 5
    assert [len(outputs[0].outputs[0].token_ids) for outputs in events[first - 1 :]] == [1, 2, 3, 4, 5]
    assert events[-1][0].finished and events[-1][0].outputs[0].token_ids == greedy(model, prompt, 5)
    engine.check_integrity()


@pytest.mark.parametrize("caching, opt_out", [(False, False), (True, True), (True, False)])
def test_chunked_prefill_progress_belongs_to_the_request_and_not_to_the_cache(loaded, caching, opt_out):
    engine = poisoned_llm(
        loaded, num_blocks=64, block_size=4, max_num_batched_tokens=16, enable_prefix_caching=caching, record=True
    ).engine
    engine.add_request("r", random_prompt(53), flat_out(2), use_prefix_cache=not opt_out)
    held = []
    for _ in range(3):
        assert engine.step() == []
        held.append(engine.pool.num_blocks - engine.pool.num_free)
    assert held == [4, 8, 12]
    (output,) = engine.step()
    assert len(output.outputs[0].token_ids) == 1 and engine.pool.num_blocks - engine.pool.num_free == 14
    engine.check_integrity()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["abort", "preempt", "break off"])
def test_chunked_prefill_that_is_aborted_registers_only_what_is_computed(loaded, model, n, how, monkeypatch):
    engine = poisoned_llm(loaded, num_blocks=64, block_size=4, max_num_batched_tokens=10).engine
    prompt, params = random_prompt(37), flat_out(4) if n == 1 else flat_out(4, n=n, temperature=0.9, seed=3)
    expected = tokens(LLM(loaded, num_blocks=64, block_size=4).generate(prompt, params)[0])
    engine.add_request("first", prompt, params)
    engine.step(), engine.step()  # 20 of 37 tokens: 5 full blocks
    if how == "abort":
        engine.abort("first")
    elif how == "preempt":
        engine.scheduler.roll_back(engine.scheduler.running[:])
    else:
        with monkeypatch.context() as broken:
            broken.setattr(engine.runner, "run", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
    engine.check_integrity()
    engine.add_request("second", prompt, flat_out(4))
    done = run(engine)
    assert tokens(done["second"]) == [greedy(model, prompt, 4)]
    if how == "abort":
        assert done["second"].num_cached_tokens == 20
    else:
        assert tokens(done["first"]) == expected and done["first"].num_cached_tokens == 0
    engine.check_integrity()


@pytest.mark.parametrize("length", [33, 48, 49, 50])
def test_logprobs_are_those_of_one_piece_at_chunk_edges_and_after_a_restart(loaded, length):
    prompt, company = random_prompt(length), [random_prompt(3, seed=s) for s in (1, 2)]
    whole = LLM(loaded, num_blocks=64, block_size=4, enable_chunked_prefill=False)
    expected = whole.generate(prompt, flat_out(6, logprobs=2))[0].outputs[0]
    engine = poisoned_llm(loaded, num_blocks=64, block_size=4, max_num_batched_tokens=16 + 2).engine
    for name, tokens_of_one in zip("ab", company, strict=True):
        engine.add_request(name, tokens_of_one, flat_out(20))
    engine.step()
    engine.add_request("r", prompt, flat_out(6, logprobs=2))
    engine.step(), engine.step()
    engine.scheduler.roll_back([r for r in engine.scheduler.running if r.request_id == "r"])
    said = run(engine)["r"].outputs[0]
    assert said.token_ids == expected.token_ids and len(said.logprobs) == 6
    for ours, theirs in zip(said.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert said.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    engine.check_integrity()


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), room=st.integers(1, 20), threshold=st.integers(0, 9)
)
@settings(max_examples=15)
def test_decodes_gain_a_token_in_every_step_whatever_arrives(loaded, lengths, room, threshold):
    streams = 3
    engine = poisoned_llm(
        loaded, num_blocks=128, block_size=4, max_num_batched_tokens=streams + len(lengths) + room,
        long_prefill_token_threshold=threshold, max_num_partial_prefills=2,
    ).engine  # fmt: skip
    for i in range(streams):
        engine.add_request(f"s{i}", random_prompt(2, seed=i), flat_out(100))
    while len(engine.step()) < streams:
        pass
    for i, length in enumerate(lengths):
        engine.add_request(f"p{i}", random_prompt(length, seed=i + 9), flat_out(2))
    while any(name.startswith("p") for name in engine.request_ids()):
        assert {f"s{i}" for i in range(streams)} <= {output.request_id for output in engine.step()}
        engine.check_integrity()


class SteppedClock:
    """Seconds pass only while the model runs: a fixed part, and one for each token."""

    def __init__(self, engine, fixed, per_token):
        self.now, self.steps, run_model = 0.0, [], engine.runner.run

        def slow(plan, requests):
            seconds = fixed + per_token * plan.num_tokens
            self.now += seconds
            self.steps.append((plan.num_tokens, seconds))
            return run_model(plan, requests)

        engine.runner.run, engine._clock = slow, lambda: self.now


def test_auto_budget_keeps_the_time_between_tokens(loaded, model):
    engine = poisoned_llm(
        loaded, num_blocks=400, block_size=4, max_num_batched_tokens="auto", tbt_target_ms=100
    ).engine
    clock = SteppedClock(engine, fixed=0.02, per_token=0.001)  # 80 tokens take 100 ms
    asked = [random_prompt(n, seed=n) for n in (3, *[120] * 8)]
    engine.add_request("r0", asked[0], flat_out(60))
    engine.step()
    for i, prompt in enumerate(asked[1:], 1):
        engine.add_request(f"r{i}", prompt, flat_out(6))
    done = run(engine)
    sizes = [n for n, _ in clock.steps]
    assert max(seconds for _, seconds in clock.steps) <= 0.1
    assert 74 <= max(sizes) <= 80 and sizes.index(max(sizes)) < 8, sizes
    for i, prompt in enumerate(asked):
        assert done[f"r{i}"].outputs[0].token_ids == greedy(model, prompt, 6 if i else 60)


def test_auto_budget_is_the_maximum_while_no_request_decodes(loaded):
    engine = poisoned_llm(
        loaded, num_blocks=100, block_size=4, max_num_batched_tokens="auto", tbt_target_ms=1, enable_prefix_caching=False
    ).engine
    clock = SteppedClock(engine, fixed=0, per_token=1.0)
    engine.add_request("alone", random_prompt(100), flat_out(3))
    run(engine)
    assert [n for n, _ in clock.steps] == [100, 1, 1], "the first step was nobody's gap"
    engine.add_request("talks", random_prompt(5), flat_out(40))
    engine.step()
    engine.add_request("comes", random_prompt(100), flat_out(1))
    engine.step()
    assert clock.steps[-1][0] == 1 + 16, "a token for who runs, and the smallest piece"
    run(engine)


def test_auto_budget_serves_every_request_even_if_the_target_is_out_of_reach(loaded, model):
    engine = poisoned_llm(loaded, num_blocks=100, block_size=4, max_num_batched_tokens="auto", tbt_target_ms=1).engine
    SteppedClock(engine, fixed=1.0, per_token=1.0)
    asked = [random_prompt(n, seed=n) for n in (3, 40, 100)]
    for i, prompt in enumerate(asked):
        engine.add_request(f"r{i}", prompt, flat_out(5))
    done = run(engine)
    assert [done[f"r{i}"].outputs[0].token_ids for i in range(3)] == [greedy(model, prompt, 5) for prompt in asked]


@pytest.mark.parametrize("settings, message", [
    ({"max_num_batched_tokens": "Auto"}, "it must be a whole number, at least 1, or 'auto'"),
    ({"max_num_batched_tokens": None}, "max_num_batched_tokens is None"),
    ({"max_num_batched_tokens": "auto", "enable_chunked_prefill": False}, "unless enable_chunked_prefill is True"),
    ({"tbt_target_ms": 0}, "tbt_target_ms is 0; it must be a number above 0"),
    ({"tbt_target_ms": float("nan")}, "tbt_target_ms"), ({"tbt_target_ms": "200"}, "tbt_target_ms"),
])  # fmt: skip
def test_budget_is_rejected_by_name_and_range(loaded, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(loaded, **settings)
