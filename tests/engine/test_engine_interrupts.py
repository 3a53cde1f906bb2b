"""Ctrl-C at every line: a step happens as a whole or not at all, its outputs are delivered once, and nothing stays behind."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import assert_recorded_truly
from mixed_run import LOADED, MixedRun, assert_answered, greedy, sampled
from remembering import Letters, remembering_llm

import labcore
from labcore.engine import signals
from labcore.engine.signals import defer_sigint, interruptible
from labcore.scheduler.plan import SchedulerOutput

OURS = (str(Path(labcore.__file__).parent), contextlib.__file__, signal.__file__, threading.__file__)


class CtrlC:
    """Presses Ctrl-C at a line of a call, counted over labcore and the library that it stands on.

    again_after: calls and returns, of C functions too, from there to a second Ctrl-C; None is one only
    """

    def __init__(self, at: int, again_after: int | None = None) -> None:
        self.at, self.lines = at, 0
        self.again_after, self.calls = again_after, 0

    def during(self, call: Callable[[], object]) -> object:
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                if self.again_after is not None:
                    sys.setprofile(self._profile)
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def _profile(self, frame, event, argument):
        self.calls += 1
        if self.calls == self.again_after:
            signal.raise_signal(signal.SIGINT)


def count_lines(call: Callable[[], object]) -> int:
    counter = CtrlC(at=0)
    counter.during(call)
    return counter.lines


def sweep(stride: int, **settings) -> int:
    """Runs with a Ctrl-C in every other step, each `stride` lines further into it, until no step is as long as that.

    Returns the number of steps that were broken off.
    """
    place, longest, broken_off = 1, 1, 0
    while place <= longest:
        run, is_turn = MixedRun(**settings), False

        def step(run: MixedRun = run) -> None:
            nonlocal place, longest, is_turn, broken_off
            is_turn = not is_turn
            if not is_turn:
                longest = max(longest, count_lines(run.step))
                return
            before = run.engine.stats()["num_waiting"]
            try:
                CtrlC(place).during(run.step)
            finally:
                place += stride
                broken_off += run.engine.stats()["num_waiting"] > before

        run.finish(step=step)
        assert not run.assert_answers()
        assert {type(error) for error in run.errors} <= {KeyboardInterrupt}
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return broken_off


@pytest.mark.parametrize("settings", [{}, {"record": False, "num_blocks": 40}], ids=["recorded", "roomy"])
def test_sigint_at_any_line_of_a_step_loses_no_output_and_changes_no_text(settings):
    """Case: a Ctrl-C at the end of an update rolled the finished step back, and its last outputs were never delivered."""
    assert sweep(stride=7, **settings) > 30


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"record": False, "num_blocks": 40}], ids=["recorded", "roomy"])
def test_sigint_at_every_line_of_a_step_loses_no_output_and_changes_no_text(settings):
    assert sweep(stride=1, **settings) > 100


@pytest.mark.parametrize("call", ["add", "fork", "abort one that runs", "abort one of n", "abort beams"])
def test_sigint_at_any_line_of_a_call_between_steps_leaves_it_done_or_undone(call):
    place, longest = 1, 1
    while place <= longest:
        run = MixedRun(num_blocks=40)
        run.add()
        run.step()
        victim = {"abort one of n": "n", "abort beams": "beams"}.get(call, "plain")

        def act(engine=run.engine, victim=victim) -> None:
            if call == "add":
                engine.add_request("new", [1, 2, 3], sampled(3, seed=0, n=3))
            elif call == "fork":
                engine.fork("plain", "new", seed=5)
            else:
                engine.abort(victim)

        before = run.engine.request_ids()
        run.attempt(partial(CtrlC(place).during, act))
        after = run.engine.request_ids()
        assert after in (before, [*before, "new"], [name for name in before if name != victim])
        for name in {"new", victim} & set(after):
            run.engine.abort(name)
        run.engine.check_integrity()
        assert_recorded_truly(run.engine)
        if place == 1:
            longest = count_lines(lambda engine=run.engine: engine.add_request("x", [1, 2, 3], sampled(3, seed=0, n=3))) * 2
        place += 13


@pytest.mark.parametrize("apart", [1, 7, 40, 150])
def test_sigint_twice_within_a_generate_leaves_nothing_behind(apart):
    """Case: the second came while the first was being cleaned up; requests stayed, and the next generate() refused."""
    params = sampled(4, seed=2, n=2)
    prompts = [[0, 1, 2], [3, 3], [2, 1, 0, 0, 1]]
    llm = remembering_llm(LOADED, num_blocks=30, record=True)
    length = count_lines(lambda: llm.generate(prompts, params))
    num_interrupted = 0
    for place in range(1, length, 181):
        try:
            CtrlC(place, again_after=apart).during(lambda: llm.generate(prompts, params))
        except KeyboardInterrupt:
            num_interrupted += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.engine.request_ids() == [] and llm.engine.pool.num_free == 30
        llm.engine.check_integrity()
        assert_recorded_truly(llm.engine)
    assert num_interrupted > 20
    for output, prompt in zip(llm.generate(prompts, params), prompts, strict=True):
        assert_answered(output, prompt, params)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals between threads here")
def test_sigint_from_outside_at_random_moments_leaves_nothing_behind():
    """The same with a thread that presses Ctrl-C twice within a millisecond or two."""
    params = greedy(12)
    prompts = [[a, b] for a in range(5) for b in range(5)]
    llm = remembering_llm(LOADED, num_blocks=200)
    began = time.perf_counter()
    llm.generate(prompts, params)
    duration = time.perf_counter() - began
    dice, main, is_armed = random.Random(0), threading.main_thread().ident, False

    def handler(*_) -> None:  # as Python's own, but for a Ctrl-C that comes when generate() has returned
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    def press(*delays: float) -> None:
        for delay in delays:
            time.sleep(delay)
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    num_interrupted = 0
    for _ in range(30):
        thread = threading.Thread(target=press, args=(dice.uniform(0, duration), dice.uniform(0, 0.002)))
        try:
            thread.start()
            is_armed = True
            llm.generate(prompts, params)
            is_armed = False
        except KeyboardInterrupt:
            num_interrupted += 1
        thread.join()
        assert llm.engine.request_ids() == [] and llm.engine.pool.num_free == 200
        llm.engine.check_integrity()
    signal.signal(signal.SIGINT, before)
    assert num_interrupted > 0


def test_sigint_leaves_undelivered_outputs_to_the_next_call():
    run = remembering_llm(LOADED, num_blocks=30)
    engine = run.engine
    engine.add_request("ends", [0, 1], greedy(1))
    engine.add_request("goes on", [1, 0], greedy(3))
    update = engine._update

    def update_and_ctrl_c(*arguments):
        update(*arguments)
        signal.raise_signal(signal.SIGINT)

    engine._update = update_and_ctrl_c
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine._update = update
    assert engine.request_ids() == ["ends", "goes on"] and engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="request_id 'ends' is in use; its last output is still to be delivered"):
        engine.add_request("ends", [1], greedy(1))
    with pytest.raises(RuntimeError, match="still serves 2 requests"):
        run.generate([[1]])
    engine.check_integrity()
    outputs = engine.step()
    assert [(output.request_id, output.finished) for output in outputs] == [("ends", True), ("goes on", False)]
    assert_answered(outputs[0], [0, 1], greedy(1))
    assert engine.request_ids() == ["goes on"]
    assert len(engine.step()[0].outputs[0].token_ids) == 2


def test_abort_returns_the_undelivered_last_output_as_it_ended():
    engine = remembering_llm(LOADED, num_blocks=30).engine
    engine.add_request("ends", [0, 1], greedy(1))
    engine.recorder = SimpleNamespace(begin_step=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.recorder = None
    assert_answered(engine.abort("ends"), [0, 1], greedy(1))
    assert engine.step() == [] and not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="'ends' is not being served"):
        engine.abort("ends")


def test_sigint_is_held_back_delivered_once_and_left_to_the_handler_that_was_there():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with defer_sigint():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert seen == []
            with defer_sigint(), interruptible():
                assert seen == ["handled"]
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                assert seen == ["handled"] * 3, "a handler that doesn't raise is called each time"
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 3
        assert len(seen) == 4
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with defer_sigint(), interruptible():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        try:
            with interruptible():
                signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)  # while the first is cleaned up
            seen.append("cleaned up")
    assert seen[-1] == "cleaned up"


@pytest.mark.parametrize("where", ["a scheduler", "a tokenizer", "a scheduler that plans nothing"])
def test_sigint_gets_through_to_a_part_that_hangs(where, monkeypatch):
    """The first Ctrl-C waits for a part that never returns; one a while later is let through. Nothing is lost even so."""
    monkeypatch.setattr(signals, "PATIENCE", 0.02)
    llm = remembering_llm(LOADED, num_blocks=30, record=True)
    presses = []

    def press() -> None:
        presses.append(signal.raise_signal(signal.SIGINT))
        assert len(presses) < 100

    def hang(*_) -> None:
        while True:
            press()
            time.sleep(0.005)

    class Hanging(Letters):
        def decode(self, token_ids, **options):
            if len(llm.engine.request_ids()) == 2 and llm.engine.stats()["num_running"] == 2:
                hang()
            return super().decode(token_ids, **options)

    scheduler = llm.engine.scheduler
    if where == "a scheduler":
        scheduler.schedule = hang
    elif where == "a scheduler that plans nothing":
        scheduler.schedule = lambda budget: press() or SchedulerOutput(1)
    else:
        llm.engine.loaded = dataclasses.replace(llm.engine.loaded, tokenizer=Hanging())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[0, 1], [1]], greedy(3))
    assert presses and llm.engine.request_ids() == [] and llm.engine.pool.num_free == 30
    llm.engine.check_integrity()
    assert_recorded_truly(llm.engine)
    scheduler.__dict__.pop("schedule", None)
    llm.engine.loaded = dataclasses.replace(llm.engine.loaded, tokenizer=Letters())
    assert_answered(llm.generate([0, 1], greedy(3))[0], [0, 1], greedy(3))
