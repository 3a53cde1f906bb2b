"""Failures of one request, of a whole step, and of every part of the engine: what fails is named, nothing else is lost.

The model is made up (see `remembering`), so that what each request must say is known without an engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Container, Iterator

import pytest
from engines import assert_recorded_truly
from mixed_run import LOADED, Fault, MixedRun, assert_answered, greedy, sampled
from remembering import VOCAB, Letters, expected_beams, expected_completion, remembering_llm

from labcore import BeamSearchParams, SamplingParams
from labcore.engine.exclusive import EngineBusy
from labcore.engine.invariants import StandstillError
from labcore.kvcache.blocks import OutOfBlocks
from labcore.recorder import NullRecorder
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.scheduler import Scheduler

PROMPTS = [[0, 1, 2, 3, 4], [1, 1, 1], [2, 0, 2, 0, 2, 0, 2], [3], [4, 0, 0, 1, 2, 2], [0, 3, 3, 1]]


class FaultyLetters(Letters):
    """Raises on a text that holds the token `on`, up to `times` times."""

    def __init__(self, on: int, times: float = math.inf) -> None:
        self.on, self.times = on, times

    def decode(self, token_ids, **options):
        if self.on in token_ids and self.times > 0:
            self.times -= 1
            raise Fault(f"no text for {self.on}")
        return super().decode(token_ids, **options)


def break_logits(llm, prompt, after: int = 0, value: float = math.nan) -> None:
    """Have the model give unsound logits behind this prompt, once `after` tokens have followed it."""
    run = llm.engine.runner.run

    def broken(plan, requests):
        caught_up, logits = run(plan, requests)
        for row, request in enumerate(caught_up):
            if request.prompt_token_ids == prompt and len(request.output_token_ids) >= after:
                logits[row] = value
        return caught_up, logits

    llm.engine.runner.run = broken


@pytest.mark.parametrize("params", [greedy(6), sampled(6, seed=3, n=3), greedy(6, logprobs=2)], ids=["1", "n = 3", "logprobs"])
@pytest.mark.parametrize("after, value", [(0, math.nan), (3, math.nan), (2, math.inf), (1, -math.inf)])
def test_unsound_logits_fail_one_prompt_of_six_by_its_position(params, after, value):
    llm = remembering_llm(LOADED, num_blocks=40, record=True)
    break_logits(llm, PROMPTS[5], after, value)
    outputs = llm.generate(PROMPTS, params)
    for output, prompt in zip(outputs[:5], PROMPTS, strict=False):
        assert_answered(output, prompt, params)
    failed = outputs[5]
    assert failed.finished and failed.prompt_token_ids == PROMPTS[5]
    assert failed.error == "its logits hold NaN or infinity, so the model's arithmetic broke down"
    for k, completion in enumerate(failed.outputs):
        tokens = expected_completion(PROMPTS[5], params, 0 if params.seed is None else params.seed + k)[0]
        assert completion.finish_reason == "error" and completion.token_ids == tokens[:after]
        assert completion.logprobs is None or len(completion.logprobs) == after
    llm.engine.check_integrity()
    assert_recorded_truly(llm.engine)
    assert llm.engine.pool.num_free == 40 and not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("after", [0, 2])
def test_unsound_logits_of_a_beam_fail_its_search_alone(after):
    llm = remembering_llm(LOADED, num_blocks=40, record=True)
    break_logits(llm, PROMPTS[0], after)
    search = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    failed, searched, answered = llm.generate(PROMPTS[:3], [search, search, greedy(6)])
    assert failed.error.startswith("its logits hold NaN") and failed.finished
    assert [len(text.token_ids) for text in failed.outputs] == [after] * (3 if after else 0)
    assert {text.finish_reason for text in failed.outputs} <= {"error"}
    assert all(text.text == Letters().decode(text.token_ids) for text in failed.outputs)
    assert [tuple(text.token_ids) for text in searched.outputs] == expected_beams(PROMPTS[1], search)
    assert_answered(answered, PROMPTS[2], greedy(6))
    llm.engine.check_integrity()
    assert_recorded_truly(llm.engine)


def test_unsound_logits_leave_no_block_in_the_prefix_cache():
    """A glitch of the hardware must not be found again by every later prompt with the same beginning."""
    llm = remembering_llm(LOADED, num_blocks=40)
    prompt = PROMPTS[0] + PROMPTS[2]
    break_logits(llm, prompt, after=3)
    (failed,) = llm.generate(prompt, greedy(6))
    assert failed.error and all(llm.engine.scheduler.kv.prefix_cache.hash_of(block) is None for block in range(40))


def test_unsound_logits_of_a_request_that_bans_every_token_fail_it_alone():
    llm = remembering_llm(LOADED, num_blocks=40)
    banned = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=list(range(VOCAB)))
    failed, answered = llm.generate(PROMPTS[:2], [banned, greedy(6)])
    assert failed.error == "min_tokens bans every token that the model allows"
    assert_answered(answered, PROMPTS[1], greedy(6))


@pytest.mark.parametrize("times", [1, math.inf], ids=["once", "always"])
@pytest.mark.parametrize("n", [1, 3])
def test_tokenizer_that_raises_on_a_token_fails_its_request_alone(n, times):
    """Case: five logprobs for six tokens, siblings that ran with nothing to compute, steps that raised for ever."""
    params = sampled(5, seed=1, n=n, logprobs=1)
    prompts = [[a, b, c] for a in range(4) for b in range(4) for c in range(4)]
    texts = {tuple(prompt): [expected_completion(prompt, params, 1 + k)[0] for k in range(n)] for prompt in prompts}
    others = [prompt for prompt in prompts if not any(4 in text for text in texts[tuple(prompt)])][:5]
    victim = next(prompt for prompt in prompts if 4 in texts[tuple(prompt)][0][1:-1])
    llm = remembering_llm(LOADED, num_blocks=60, record=True)
    llm.engine.loaded = dataclasses.replace(llm.engine.loaded, tokenizer=FaultyLetters(4, times))
    for i, prompt in enumerate([*others, victim]):
        llm.engine.add_request(f"r{i}", prompt, params)
    done = {}
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step() if output.finished}
        llm.engine.check_integrity()
        assert_recorded_truly(llm.engine)
    failed = done.pop(f"r{len(others)}")
    assert failed.error == "tokenizer: Fault: no text for 4"
    for completion, tokens in zip(failed.outputs, texts[tuple(victim)], strict=True):
        assert completion.finish_reason == "error"
        assert completion.token_ids == tokens[: len(completion.token_ids)]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert Letters().decode(completion.token_ids).startswith(completion.text)
    raised = [completion for completion in failed.outputs if completion.token_ids[-1] == 4]
    assert any(completion.text == Letters().decode(completion.token_ids[:-1]) for completion in raised)
    assert len(done) == len(others) >= 2
    for i, prompt in enumerate(others):
        assert_answered(done[f"r{i}"], prompt, params)


def test_tokenizer_that_raises_on_a_beams_text_fails_its_search_alone():
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    prompt = PROMPTS[1]
    said = next(token for token in expected_beams(prompt, params)[0] if token not in prompt)
    llm = remembering_llm(LOADED, num_blocks=60)
    llm.engine.loaded = dataclasses.replace(llm.engine.loaded, tokenizer=FaultyLetters(said))
    one = greedy(1, stop_token_ids=list(range(VOCAB)))  # ends at once, and its end is no text
    beams, plain = llm.generate([prompt, prompt], [params, one])
    assert beams.error == f"tokenizer: Fault: no text for {said}" and beams.finished
    assert {text.finish_reason for text in beams.outputs} == {"error"}
    assert plain.error is None and plain.outputs[0].finish_reason == "stop"
    llm.engine.check_integrity()
    assert llm.engine.pool.num_free == 60


def test_abort_ends_a_request_whose_tokenizer_has_none_of_it():
    """Case: abort raised, and the request stayed."""

    class Stubborn(Letters):
        def decode(self, token_ids, **options):
            if len(token_ids) == 5:
                raise Fault
            return super().decode(token_ids, **options) + "\ufffd"

    llm = remembering_llm(LOADED, num_blocks=60)
    llm.engine.loaded = dataclasses.replace(llm.engine.loaded, tokenizer=Stubborn())
    llm.engine.add_request("r", [0], greedy(50))
    for _ in range(30):
        llm.engine.step()
        if not llm.engine.request_ids():
            break
    else:
        assert llm.engine.abort("r").finished
    assert llm.engine.pool.num_free == 60
    llm.engine.check_integrity()


UNTOUCHED = {"check_integrity", "assert_recorded_truly", "stats"}


def make_faulty(part: object, method: str, fails_at: Container[int]) -> list[int]:
    """Have the part's method raise at some of its calls, before it does anything. Returns the count of calls."""
    calls = [0]
    original = getattr(type(part), method)

    def faulty(self, *arguments, **options):
        if self is not part or UNTOUCHED & set(callers()):
            return original(self, *arguments, **options)
        calls[0] += 1
        if calls[0] in fails_at:
            raise Fault(f"{method} number {calls[0]}")
        return original(self, *arguments, **options)

    part.__class__ = type(f"Faulty{type(part).__name__}", (type(part),), {method: faulty})
    return calls


def callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


PLUGS = {
    "block_pool": ["allocate", "free", "incref", "share", "refcount", "is_writable"],
    "kv_cache_manager": ["match", "fits", "blocks_missing", "attach", "reserve", "commit", "share", "free", "open_table"],
    "prefix_cache": ["match", "cache_full_blocks", "evict"],
    "preemption": ["preempt"],
    "chunking": ["begin_step", "num_tokens"],
    "policy": ["sort_key", "can_preempt"],
    "scheduler": ["add", "schedule", "commit", "share_prompt", "fork", "finish", "_preempt", "_admit", "_reserve"],
    "recorder": ["added", "begin_step", "scheduled", "sampled", "finished", "end_step"],
}


@pytest.mark.parametrize("part, method", [(part, method) for part, methods in PLUGS.items() for method in methods])
def test_plugged_in_part_that_raises_is_named_and_no_request_is_lost(part, method):
    """Case: a pool whose touch raised left a request in no queue; a recorder that raised had one served for ever."""
    counting = MixedRun()
    calls = make_faulty(counting.engine.parts()[part], method, ())
    counting.finish()
    assert calls[0] and not counting.errors and not counting.assert_answers()
    for k in {1 + round(i * (calls[0] - 1) / 7) for i in range(8)}:
        run = MixedRun(is_recorder_sound=part != "recorder")
        make_faulty(run.engine.parts()[part], method, {k})
        run.finish()
        failed = run.assert_answers()
        assert len(run.errors) + len(failed) == 1, f"call {k}"
        for error in run.errors:
            assert f"raised by the engine's {part}, Faulty" in error.__notes__[0]
        assert all(output.error == f"{part}: Fault: {method} number {k}" for output in failed)


def test_pool_that_frees_nothing_loses_no_request_and_is_asked_again():
    """Each step whose requests end says so; every output is delivered, and the audit knows whose the blocks are."""
    run = MixedRun(num_blocks=60, is_recorder_sound=False)  # the pool is not what it should be; the record is
    broken = set(range(10_000))
    make_faulty(run.engine.pool, "free", broken)
    for _ in range(60):
        run.attempt(run.add)
        run.attempt(run.step)
    assert not run.assert_answers() and run.done.keys() == run.PARAMS.keys()
    assert run.errors and all("raised by the engine's block_pool" in error.__notes__[0] for error in run.errors)
    assert run.engine.pool.num_free < 60 and not run.engine.has_unfinished_requests()
    broken.clear()
    run.llm.generate([[0, 1]], greedy(2))
    assert run.engine.pool.num_free == 60
    run.engine.check_integrity()


def test_recorder_that_always_raises_stops_no_request_and_no_later_generate():
    run = MixedRun(is_recorder_sound=False)
    make_faulty(run.engine.recorder, "end_step", range(10_000))
    run.finish()
    assert not run.assert_answers() and len(run.errors) > 10
    for _ in range(2):
        with pytest.raises(Fault):
            run.llm.generate([[0, 1]], greedy(2))
        assert run.engine.request_ids() == []
        run.engine.check_integrity()
    run.engine.recorder = NullRecorder()
    assert_answered(run.llm.generate([[0, 1]], greedy(2))[0], [0, 1], greedy(2))


def test_budget_that_raises_fails_the_step_or_is_deferred_to_its_end():
    llm = remembering_llm(LOADED, num_blocks=30, max_num_batched_tokens="auto", record=True)
    for method in ("tokens", "observe"):
        llm.engine.add_request(method, [0, 1, 2], greedy(4))
        llm.engine.step()
        sound = type(llm.engine.budget)
        make_faulty(llm.engine.budget, method, {1})
        with pytest.raises(Fault) as caught:
            llm.engine.step()
        assert "raised by the engine's budget, Faulty" in caught.value.__notes__[0]
        llm.engine.check_integrity()
        assert_recorded_truly(llm.engine)
        llm.engine.budget.__class__ = sound
        while llm.engine.has_unfinished_requests():
            (output,) = llm.engine.step()
        assert_answered(output, [0, 1, 2], greedy(4))


def test_out_of_blocks_says_that_they_belong_to_no_request():
    """Case: blocks that were taken out of the pool by hand, until none was left: "max() arg is an empty sequence"."""
    llm = remembering_llm(LOADED, num_blocks=8, record=True)
    engine = llm.engine
    engine.add_request("r", [0, 1, 2, 3, 4], greedy(9))
    engine.step()
    taken = engine.pool.allocate(6)
    for _ in range(3):  # the block it has is half empty
        assert engine.step()
    with pytest.raises(OutOfBlocks, match="no request can be scheduled: 6 of the pool's 8 blocks belong to no request, and 2"):
        engine.step()
    with pytest.raises(OutOfBlocks):
        engine.step()
    assert engine.recorder.at().leaked == 6 and engine.recorder.at().queues["waiting"] == ["r"]
    engine.pool.free(taken)
    engine.check_integrity()
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert_answered(output, [0, 1, 2, 3, 4], greedy(9))


class ForgetsToQueue(Scheduler):
    """`add` forgets the queue, but for the first request."""

    def add(self, request, siblings=()):
        super().add(request, siblings)
        if request.arrival > 0:
            self.waiting.discard(request)


class NeverQueuesAgain(Scheduler):
    """A preempted request leaves the batch, and is in no queue."""

    def _preempt(self, request, plan):
        super()._preempt(request, plan)
        self.waiting.discard(request)


class PlansNothing(Scheduler):
    """Has every request in its queue, and no token for any of them."""

    def schedule(self, budget=None):
        return SchedulerOutput(self._step)


@pytest.mark.parametrize("scheduler, why", [
    (ForgetsToQueue, "3 steps in a row planned nothing, and the scheduler has lost 'generate-1', 'generate-2', "
                     "'generate-3' and 2 more: add"),
    (NeverQueuesAgain, "3 steps in a row planned nothing, and the scheduler has lost 'generate-[1-5]'"),
    (PlansNothing, "3 steps in a row planned nothing, and 'generate-0', 'generate-1', 'generate-2' and 3 more could go on"),
])  # fmt: skip
def test_standstill_of_a_plugged_in_scheduler_names_the_requests(scheduler, why):
    """Case: generate() went on for ever with a scheduler that had lost a request."""
    llm = remembering_llm(LOADED, num_blocks=10, scheduler=scheduler, record=True)
    calls, step = [], llm.engine.step
    llm.engine.step = lambda: calls.append(1) or step()
    with pytest.raises(StandstillError, match=why):
        llm.generate(PROMPTS, greedy(16))
    assert len(calls) < 60 and llm.engine.request_ids() == []
    llm.engine.check_integrity()
    assert llm.engine.pool.num_free == 10


def test_standstill_leaves_the_lost_request_queued_for_the_next_step():
    engine = remembering_llm(LOADED, num_blocks=40, scheduler=ForgetsToQueue).engine
    engine.add_request("first", PROMPTS[0], greedy(2))
    engine.add_request("lost", PROMPTS[1], greedy(4))
    with pytest.raises(StandstillError, match="has lost 'lost'"):
        while engine.has_unfinished_requests():
            engine.step()
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert_answered(output, PROMPTS[1], greedy(4))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_rollback_after_some_siblings_have_their_blocks_samples_each_first_token_once(k):
    """Case: a continuation that was sent back by itself drew from its sibling's logits, too, and said a token twice."""
    engine = remembering_llm(LOADED, num_blocks=40, record=True).engine
    make_faulty(engine.scheduler, "share_prompt", {k})
    asked = {"r": ([0, 1, 2, 3, 4, 0], sampled(5, seed=3, n=4)), "other": ([3] * 18, sampled(3, seed=0, n=2))}
    for name, request in asked.items():
        engine.add_request(name, *request)
    done, errors = {}, []
    while engine.has_unfinished_requests():
        try:
            done |= {output.request_id: output for output in engine.step()}
        except Fault as fault:
            errors.append(fault)
        engine.check_integrity()
        assert_recorded_truly(engine)
    assert len(errors) == 1
    for name, request in asked.items():
        assert_answered(done[name], *request)


def test_engine_busy_for_a_second_thread():
    """Case: 13 answers of which 2 were wrong, and more than a thousand KeyErrors and IndexErrors."""
    llm = remembering_llm(LOADED, num_blocks=60)
    prompts, params = PROMPTS[:3], sampled(8, seed=1, n=2)
    answers, refused, others = [], [], []

    def ask() -> None:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            try:
                answers.append(llm.generate(prompts, params))
            except EngineBusy as busy:
                refused.append(busy)
                with contextlib.suppress(EngineBusy):
                    llm.engine.add_request("by hand", [0], greedy(1))
                    llm.engine.abort("by hand")
                llm.engine.stats()
                with contextlib.suppress(EngineBusy):
                    llm.engine.check_integrity()
            except Exception as error:
                others.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert others == [] or {str(error)[:27] for error in others} == {"the engine still serves 1 r"}
    assert answers and refused and "call from another thread" in str(refused[0])
    for outputs in answers:
        for output, prompt in zip(outputs, prompts, strict=True):
            assert_answered(output, prompt, params)
    assert llm.engine.request_ids() == []
    llm.engine.check_integrity()


@pytest.mark.parametrize("call", [
    lambda llm: llm.engine.step(),
    lambda llm: llm.engine.add_request("new", [1], greedy(1)),
    lambda llm: llm.engine.abort("r"),
    lambda llm: llm.engine.fork("r", "new"),
    lambda llm: llm.generate([[1]]),
], ids=["step", "add", "abort", "fork", "generate"])  # fmt: skip
def test_engine_busy_for_a_call_from_inside_a_step_which_goes_on(call):
    """From a tokenizer, a recorder, a clock: from any part that the engine calls."""
    llm = remembering_llm(LOADED, num_blocks=30)
    refused = []

    class Calling(Letters):
        def decode(self, token_ids, **options):
            if llm.engine.request_ids():
                with pytest.raises((EngineBusy, RuntimeError)) as caught:
                    call(llm)
                refused.append(caught.value)
            return super().decode(token_ids, **options)

    llm.engine.loaded = dataclasses.replace(llm.engine.loaded, tokenizer=Calling())
    llm.engine.add_request("r", [0, 1, 2], greedy(3))
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
    assert_answered(output, [0, 1, 2], greedy(3))
    assert refused and all("busy with the call that this one is made from" in str(error) for error in refused)
    assert llm.engine.request_ids() == []
