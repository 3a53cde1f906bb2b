"""The flight recorder beside the real engine: the same state after every step, and a small share of its time."""

from __future__ import annotations

import pytest
from engines import assert_recorded_truly
from tiny_models import prompt, tiny

from labcore import LLM, BeamSearchParams, SamplingParams
from labcore.kvcache.blocks import BlockPool
from labcore.models import from_model
from labcore.recorder import Recorder, Recording
from labcore.request import RequestStatus
from labcore.viz import text_view


@pytest.mark.parametrize("num_blocks", [64, 20])
def test_beams_forked_within_a_step_are_recorded_truly(num_blocks):
    """A child arrives with the token that made it; it must not be told twice, nor before the child is known."""
    engine = LLM(from_model(tiny("llama")), block_size=4, record=True, num_blocks=num_blocks, max_num_seqs=5).engine
    engine.add_request("beams", prompt(6), BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True))
    engine.add_request("plain", prompt(9, seed=1), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        assert_recorded_truly(engine)
    assert "prefill" not in {span.state for span in engine.recorder.spans() if span.request_id.startswith("beams/")} or (
        engine.stats()["num_preemptions"] > 0
    )
    assert len(list(engine.recorder.events())) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 64},
        {"num_blocks": 17, "max_num_batched_tokens": 16},
        {"num_blocks": 20, "scheduling_policy": "priority", "max_num_seqs": 3},
        {"num_blocks": 20, "scheduling_policy": "priority", "max_num_seqs": 3, "priority_aging_steps": 3},
        {"num_blocks": 20, "enable_prefix_caching": False, "enable_chunked_prefill": False},
    ],
    ids=["roomy", "tight and chunked", "by priority", "aging", "plain"],
)
def test_recorder_equals_the_engines_own_state_after_every_step(settings):
    engine = LLM(from_model(tiny("llama")), block_size=4, record=True, max_model_len=64, **settings).engine
    head = prompt(12)
    for i in range(9):
        params = SamplingParams(temperature=1, max_tokens=4 + i, n=3 if i % 4 == 0 else 1, ignore_eos=True)
        engine.add_request(f"r{i}", head + prompt(2 + 3 * i, seed=i), params, priority=-i)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        assert_recorded_truly(engine)
        if steps == 6:
            engine.abort(engine.request_ids()[0])
            assert_recorded_truly(engine)
        assert steps < 500
    assert engine.recorder.steps == list(range(1, steps + 1))
    kinds = {event.kind for event in engine.recorder.events()}
    assert {"arrive", "admit", "allocate", "share", "copy_on_write", "chunk", "token", "free", "finish"} <= kinds
    assert ("cached" in kinds) == engine.config.enable_prefix_caching
    assert ("preempt" in kinds) == (engine.stats()["num_preemptions"] > 0)


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 9}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 5}], ids=str)
def test_forks_between_two_steps_are_recorded_truly(settings):
    """Of whoever is there: one who runs, one in mid-prefill, one who was sent back, one who waits."""
    model = from_model(tiny("llama"))
    engine = LLM(model, block_size=4, record=True, max_model_len=32, **{"num_blocks": 40} | settings).engine
    for i in range(3):
        engine.add_request(f"r{i}", prompt(5 + 4 * i, seed=i), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for step in range(200):
        if step < 5:
            engine.fork(f"r{step % 3}", f"fork {step}")
            assert_recorded_truly(engine)
        if step == 7:
            engine.abort(engine.request_ids()[-1])
            assert_recorded_truly(engine)
        engine.step()
        assert_recorded_truly(engine)
        if not engine.has_unfinished_requests():
            break
    assert not engine.has_unfinished_requests()
    told = [e for e in engine.recorder.events() if e.kind == "arrive" and e.request.startswith("fork")]
    assert len(told) == 5
    assert (engine.stats()["num_preemptions"] > 0) == ("num_blocks" in settings)


def test_failed_step_is_recorded_as_the_engine_leaves_it():
    engine = LLM(from_model(tiny("llama")), block_size=4, num_blocks=32, record=True).engine
    engine.add_request("r", prompt(9), SamplingParams(temperature=0, max_tokens=6))
    engine.step()
    whole, engine.runner.run = engine.runner.run, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert_recorded_truly(engine)
    assert engine.recorder.at().requests["r"].state == "preempted"
    engine.runner.run = whole
    while engine.has_unfinished_requests():
        engine.step()
        assert_recorded_truly(engine)


def test_a_prefix_cache_that_is_reset_is_recorded_as_empty():
    llm = LLM(from_model(tiny("llama")), block_size=4, num_blocks=32, record=True)
    llm.generate(prompt(9), SamplingParams(temperature=0, max_tokens=6))
    assert any(block.hash for block in llm.engine.recorder.at().blocks)
    llm.engine.reset_prefix_cache()
    assert_recorded_truly(llm.engine)
    llm.generate(prompt(9), SamplingParams(temperature=0, max_tokens=6))
    assert_recorded_truly(llm.engine)


def test_custom_pool_is_recorded_without_hooks():
    class Backwards(BlockPool):
        def __init__(self, num_blocks: int, block_size: int) -> None:
            super().__init__(num_blocks, block_size, free_order=range(num_blocks - 1, -1, -1))

    engine = LLM(from_model(tiny("llama")), block_pool=Backwards, block_size=4, num_blocks=16, record=True).engine
    engine.add_request("r", prompt(9), SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    assert engine.recorder.at(1).tables == {"r": [15, 14, 13]}


def test_recording_is_off_by_default():
    assert not isinstance(LLM(from_model(tiny("llama")), block_size=4, num_blocks=16).engine.recorder, Recorder)


def test_waiting_request_is_recorded_as_waiting():
    engine = LLM(from_model(tiny("llama")), block_size=4, num_blocks=16, record=True, max_num_seqs=1).engine
    for name in ("ana", "bo"):
        engine.add_request(name, prompt(5), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    engine.step()
    assert engine.recorder.at().queues == {"waiting": ["bo"], "running": ["ana"], "swapped": []}
    assert [request.status for request in engine.scheduler.waiting] == [RequestStatus.WAITING]


def test_aging_orders_the_recorded_queues_as_the_scheduler_does(tmp_path):
    """Five steps of waiting are worth more than one priority number at four steps a number: old goes before urgent."""
    settings = {"scheduling_policy": "priority", "priority_aging_steps": 4, "max_num_seqs": 1, "max_model_len": 64}
    engine = LLM(from_model(tiny("llama")), block_size=4, num_blocks=16, record=True, **settings).engine
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add_request("runs", prompt(5), params)
    engine.add_request("old", prompt(5), params, priority=1)
    for _ in range(5):
        engine.step()
    engine.add_request("urgent", prompt(5), params)
    engine.add_request("later", prompt(5), params, priority=1)
    engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["old", "urgent", "later"]
    assert engine.recorder.at().queues == {"waiting": ["old", "urgent", "later"], "running": ["runs"], "swapped": []}
    engine.recorder.save(tmp_path / "run.jsonl")
    assert Recording.load(tmp_path / "run.jsonl").at(6).queues == engine.recorder.at(6).queues
    rows = [line.split() for line in text_view(engine.recorder, figure="queues").splitlines()[1:]]
    assert [row[2] for row in rows if row[0] == "waiting"] == ["old", "urgent", "later"]
