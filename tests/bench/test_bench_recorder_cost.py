"""`labcore bench recorder`: the figures are what their names say. How good they are is for a quiet machine to judge."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny_models import tiny

from labcore.bench import recorder_cost as recorder
from labcore.models import from_model


@pytest.fixture
def found(monkeypatch):
    work = SimpleNamespace(prompts=[[i + 1] * 20 for i in range(4)], output_lens=[4] * 4)
    monkeypatch.setattr(recorder, "lognormal_workload", lambda n, vocab: work)
    return recorder.cost(from_model(tiny("llama")), num_requests=4)


def test_share_and_size_are_those_of_the_run(found):
    assert found["steps"] == 4
    assert 0 < found["share"] < 1
    assert found["recorder_ms_per_step"] * found["steps"] == pytest.approx(1000 * found["share"] * found["engine_s"])
    assert 0 < found["mb_per_10000_steps"] < recorder.GOAL_MB
