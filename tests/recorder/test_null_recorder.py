"""The null recorder: it accepts every call that an engine makes of a recorder, and records nothing."""

from __future__ import annotations

import ast
import inspect

import pytest

from labcore.engine import engine
from labcore.recorder import NullRecorder, Recorder, Recording


def calls_of_the_engine() -> set[str]:
    """Events that the engine's source passes to `self._record`."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(engine))) if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if ast.unparse(call.func) == "self._record"}


CALLS = {"added", "begin_step", "scheduled", "sampled", "finished", "evicted", "roll_back", "end_step"}


def test_null_recorder_has_every_method_that_the_engine_calls():
    assert calls_of_the_engine() == CALLS
    assert {name for name in vars(NullRecorder) if not name.startswith("_")} == CALLS


@pytest.mark.parametrize("name", sorted(CALLS))
def test_null_recorder_takes_the_same_arguments_as_the_recorder(name):
    assert inspect.signature(getattr(NullRecorder, name)) == inspect.signature(getattr(Recorder, name))


def test_null_recorder_returns_nothing_and_is_no_recording():
    null = NullRecorder()
    for call in (null.added, null.finished):
        assert call(object()) is None
    assert null.begin_step() is null.scheduled(None, ()) is null.sampled(None, 1) is null.end_step() is None
    assert not isinstance(null, Recording)
