"""The flight recorder tells the truth about every step, whatever the engine, the pool and the scheduler do."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import Status, ToyEngine

from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.recorder import EVENT_KINDS, Recorder, Recording, Span


def truth(engine: ToyEngine) -> dict:
    """The engine's own state, in the words of a snapshot."""
    return {
        "tables": {r.request_id: list(r.table.blocks) for r in engine.running if r.table and r.table.blocks},
        "refcounts": [engine.pool.refcount(block) for block in range(engine.pool.num_blocks)],
        "computed": {r.request_id: r.num_computed_tokens for r in engine.running},
        "tokens": {r.request_id: r.prompt_token_ids + r.output_token_ids for r in engine.running + engine.waiting},
        "queues": {
            "waiting": {r.request_id for r in engine.waiting if r.status is Status.WAITING},
            "running": {r.request_id for r in engine.running if r.num_computed_tokens},
            "swapped": {r.request_id for r in engine.waiting if r.status is Status.SWAPPED},
        },
        "free": engine.pool.num_free,
    }


def told(snapshot) -> dict:
    running = set(snapshot.queues["running"])
    return {
        "tables": snapshot.tables,
        "refcounts": [block.refcount for block in snapshot.blocks],
        "computed": {name: r.num_computed_tokens for name, r in snapshot.requests.items() if name in running},
        "tokens": {name: list(r.token_ids) for name, r in snapshot.requests.items()},
        "queues": {name: set(queue) for name, queue in snapshot.queues.items()},
        "free": snapshot.count("free") + snapshot.count("cached"),
    }


def run_and_note(engine: ToyEngine, forks=(), aborts=()) -> list[dict]:
    """Run to the end; the truth after each step. `forks` and `aborts` hit the last running request at those steps."""
    notes = []
    while engine.waiting or engine.running:
        if engine.step_number in forks and engine.running and len(engine.running) < engine.max_seqs:
            parent = engine.running[-1]
            if parent.num_tokens - parent.num_computed_tokens == 1:
                engine.fork(parent, f"{parent.request_id}/fork{engine.step_number}")
        if engine.step_number in aborts and engine.running:
            engine.abort(engine.running[-1])
            if not engine.waiting and not engine.running:
                break
        engine.step()
        notes.append(truth(engine))
        assert engine.step_number < 2000
    return notes


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    num_blocks=st.integers(8, 24),
    budget=st.integers(1, 24),
    num_host_blocks=st.sampled_from([0, 16]),
    prefix_cache=st.booleans(),
    forks=st.sets(st.integers(1, 30), max_size=2),
    aborts=st.sets(st.integers(1, 30), max_size=2),
)
def test_snapshot_equals_the_engines_own_state_after_every_step(
    prompts, num_blocks, budget, num_host_blocks, prefix_cache, forks, aborts
):
    engine = ToyEngine(num_blocks, 4, budget, num_host_blocks=num_host_blocks, prefix_cache=prefix_cache)
    for i, (prompt, outputs) in enumerate(prompts):
        engine.add(f"r{i}", prompt, outputs)
    notes = run_and_note(engine, forks, aborts)
    recorder = engine.recorder
    for step, note in enumerate(notes, 1):
        snapshot = recorder.at(step)
        assert told(snapshot) == note, step
        assert snapshot.leaked == 0
    for step in (len(notes), 1):  # and in any order
        if notes:
            assert told(recorder.at(step)) == notes[step - 1]


def kinds(recorder: Recording) -> set[str]:
    return {event.kind for event in recorder.events()}


def pressed(**kw) -> ToyEngine:
    """Two requests that outgrow a pool of 6 blocks together."""
    engine = ToyEngine(6, 4, **kw)
    engine.add("ana", 9, 8)
    engine.add("bo", 9, 8)
    return engine.run()


def test_preemption_frees_the_blocks_and_the_request_resumes():
    recorder = pressed().recorder
    story = [
        event.kind for event in recorder.events() if event.request == "bo" and event.kind not in ("chunk", "token")
    ]
    story = [kind for kind, before in zip(story, ["", *story[:-1]], strict=True) if kind != before]
    assert story == ["arrive", "admit", "allocate", "free", "preempt", "resume", "allocate", "free", "finish"]
    step = next(event.step for event in recorder.events() if event.kind == "preempt")
    bo = recorder.at(step).requests["bo"]
    assert (bo.state, bo.blocks, bo.num_computed_tokens, bo.num_preemptions) == ("preempted", (), 0, 1)
    assert len(bo.token_ids) > 9, "the tokens stay"
    assert [span.state for span in recorder.spans() if span.request_id == "bo"] == [
        "prefill", "decode", "preempted", "prefill", "decode",
    ]  # fmt: skip


def test_swap_keeps_progress_and_host_blocks():
    recorder = pressed(num_host_blocks=8).recorder
    out, back = (next(e for e in recorder.events() if e.kind == kind) for kind in ("swap_out", "swap_in"))
    bo = recorder.at(out.step).requests["bo"]
    assert (bo.state, bo.blocks, bo.host_blocks) == ("swapped", (), tuple(out.detail["host"]))
    assert bo.num_computed_tokens > 9
    assert [host for host, _ in back.detail["pairs"]] == list(bo.host_blocks)
    assert list(back.blocks) == list(recorder.at(back.step).requests["bo"].blocks[: len(back.blocks)])
    assert [span.state for span in recorder.spans() if span.request_id == "bo"] == [
        "prefill", "decode", "swapped", "decode",
    ]  # fmt: skip


def test_fork_shares_every_block_until_it_writes():
    engine = ToyEngine(12, 4)
    ana = engine.add("ana", 6, 6)
    engine.step()
    engine.fork(ana, "ana/1")
    shared = engine.recorder.at()
    assert [block.owners for block in shared.blocks[:2]] == [(("ana", 0), ("ana/1", 0)), (("ana", 1), ("ana/1", 1))]
    engine.step()
    copy = next(event for event in engine.recorder.events() if event.kind == "copy_on_write")
    assert (copy.step, copy.request, copy.blocks) == (2, "ana", (1, 2))
    after = engine.recorder.at(2)
    assert after.tables == {"ana": [0, 2], "ana/1": [0, 1]}
    assert [after.blocks[i].refcount for i in (0, 1, 2)] == [2, 1, 1]


def test_fork_within_a_step_owns_its_blocks_from_that_step_on():
    engine = ToyEngine(12, 4)
    ana = engine.add("ana", 6, 6)
    follower = engine.add("ana/1", 6, 6)
    engine.waiting.remove(follower)
    engine.recorder.begin_step(1)
    engine.recorder.scheduled(*engine._plan())
    ana.num_computed_tokens = 6
    follower.table, follower.num_computed_tokens = ana.table.fork(), 6
    engine.running.append(follower)
    for request in (ana, follower):
        engine.recorder.sampled(request, 7)
        request.output_token_ids.append(7)
    engine.recorder.end_step(engine.pool)
    assert told(engine.recorder.at(1)) == truth(engine)
    assert [block.refcount for block in engine.recorder.at(1).blocks[:2]] == [2, 2]


def test_prefix_hit_reuses_cached_blocks_and_is_recorded():
    engine = ToyEngine(8, 4, prefix_cache=True)
    engine.add("ana", range(10), 2)
    engine.run()
    cached = engine.recorder.at()
    assert [block.state for block in cached.blocks] == ["cached"] * 2 + ["free"] * 6
    assert cached.blocks[1].tokens == (4, 5, 6, 7) and len(cached.blocks[1].hash) == 16
    engine.add("bo", [*range(8), 77, 78], 2)
    engine.run()
    hit = next(event for event in engine.recorder.events() if event.kind == "cache_hit")
    assert (hit.request, hit.blocks, hit.detail) == ("bo", (0, 1), {"tokens": 8})
    assert [e.blocks for e in engine.recorder.events() if e.request == "bo" and e.kind == "share"] == [(0, 1)]


def test_eviction_precedes_the_allocation_of_a_cached_block():
    engine = ToyEngine(3, 4, prefix_cache=True)
    engine.add("ana", range(9), 1)
    engine.run()
    engine.add("bo", range(50, 61), 1)
    engine.run()
    events = [(event.kind, event.blocks) for event in engine.recorder.events(2)]
    evictions = [blocks for kind, blocks in events if kind == "evict"]
    assert sorted(evictions) == [(0,), (1,)]
    assert events.index(("evict", evictions[0])) < next(i for i, (kind, _) in enumerate(events) if kind == "allocate")
    assert all(block.hash is None or block.tokens[0] >= 50 for block in engine.recorder.at().blocks)


def test_events_have_a_known_kind_a_step_and_a_time():
    seen = set()
    for engine in (pressed(), pressed(num_host_blocks=8), pressed(prefix_cache=True)):
        for event in engine.recorder.events():
            assert event.kind in EVENT_KINDS
            assert event.step in engine.recorder.steps and event.time >= 0
            seen.add(event.kind)
    assert {"arrive", "admit", "allocate", "chunk", "token", "free", "finish", "preempt", "swap_out", "resume"} <= seen


def test_chunks_and_tokens_add_up_to_the_work_that_was_done():
    engine = ToyEngine(12, 4, budget=5)
    engine.add("ana", 12, 3)
    engine.run()
    chunks = [event.detail["tokens"] for event in engine.recorder.events() if event.kind == "chunk"]
    assert chunks == [5, 5, 2, 1, 1]
    assert sum(event.kind == "token" for event in engine.recorder.events()) == 3
    assert engine.recorder.at(2).scheduled == {"ana": 5}


def test_abort_between_two_steps_belongs_to_the_next_one():
    engine = ToyEngine()
    ana = engine.add("ana", 5, 9)
    engine.add("bo", 5, 9)
    engine.step()
    engine.abort(ana)
    assert "ana" in engine.recorder.at(1).requests
    assert "ana" not in engine.recorder.at().requests
    engine.step()
    finish = next(event for event in engine.recorder.events() if event.kind == "finish")
    assert (finish.step, finish.detail) == (2, {"reason": "abort"})


def test_failed_step_is_closed_and_the_record_continues():
    engine = ToyEngine()
    engine.add("ana", 5, 3)
    engine.step_number = 1
    engine.recorder.begin_step(1)
    engine.recorder.scheduled(*engine._plan())
    for request in engine.running:  # what an engine does after an error: nothing was computed
        request.table.truncate(0)
    engine.run()
    assert engine.recorder.steps == list(range(1, engine.step_number + 1))
    assert engine.recorder.at().requests == {}
    assert sum(event.kind == "token" for event in engine.recorder.events()) == 3


def test_a_step_that_broke_off_while_it_was_planned_is_closed_with_what_it_took():
    """Case: with no plan to go by, the record kept the blocks of requests that had lost theirs, and their hashes."""
    engine = ToyEngine(prefix_cache=True)
    ana = engine.add("ana", 9, 3)
    engine.step()
    engine.add("bo", 5, 2)
    engine.recorder.begin_step()
    engine._plan()  # and here the scheduler raised: the recorder never sees the plan
    for request in list(engine.running):
        engine.running.remove(request)
        engine.waiting.append(request)
        request.status, request.num_computed_tokens = Status.WAITING, 0
        request.table.free()
    for block in list(engine.block_to_hash)[:1]:
        engine._forget(block)
    engine.recorder.roll_back(engine.pool)
    assert told(engine.recorder.at()) == truth(engine)
    assert engine.recorder.at().requests["ana"].state == "preempted" and ana.num_computed_tokens == 0
    assert [block.hash is not None for block in engine.recorder.at().blocks].count(True) == len(engine.block_to_hash)
    engine.recorder.end_step(engine.pool)
    assert engine.recorder.steps == [1, 2, 3], "an end without a beginning is a step of its own, and no error"


def test_failed_step_leaves_its_requests_preempted():
    engine = ToyEngine()
    ana = engine.add("ana", 5, 3)
    engine.step()
    engine.recorder.begin_step()
    engine.recorder.scheduled(*engine._plan())
    engine.running.remove(ana)
    engine.waiting.append(ana)
    ana.status, ana.num_computed_tokens = Status.WAITING, 0
    ana.table.free()
    engine.recorder.roll_back(engine.pool)
    assert told(engine.recorder.at(2)) == truth(engine)
    assert engine.recorder.at(2).requests["ana"].state == "preempted"
    engine.step_number += 1
    engine.run()
    assert engine.recorder.at().requests == {}


def test_pool_that_grows_or_allocates_too_high_an_id_is_recorded():
    engine = ToyEngine(4, 4)
    engine.pool = BlockPool(8, 4, free_order=[7, 6, 5, 4, 3, 2, 1, 0])
    engine.add("ana", 5, 2)
    engine.step()
    assert len(engine.recorder.at(1).blocks) == 8
    assert engine.recorder.at(1).blocks[7].owners == (("ana", 0),)


def test_leaked_blocks_are_those_that_no_table_lists():
    engine = ToyEngine()
    engine.add("ana", 5, 2)
    engine.pool.allocate(3)
    engine.step()
    assert engine.recorder.at(1).leaked == 3


def test_observe_records_tables_without_an_engine():
    pool, recorder = BlockPool(8, 4), Recorder(8, 4)
    ana = BlockTable(pool)
    ana.append(6)
    recorder.observe({"ana": ana}, pool)
    bo = ana.fork()
    recorder.observe({"ana": ana, "bo": bo}, pool)
    bo.copy_on_write()
    bo.append(1)
    recorder.observe({"ana": ana, "bo": bo}, pool)
    ana.free()
    recorder.observe({"bo": bo}, pool)
    assert [recorder.at(step).tables for step in recorder.steps] == [
        {"ana": [0, 1]}, {"ana": [0, 1], "bo": [0, 1]}, {"ana": [0, 1], "bo": [0, 2]}, {"bo": [0, 2]},
    ]  # fmt: skip
    assert [e.blocks for e in recorder.events() if e.kind == "copy_on_write"] == [(1, 2)]
    assert [len(block.tokens) for block in recorder.at(3).blocks[:3]] == [4, 2, 3]


def test_snapshot_of_an_unrecorded_step_is_refused():
    with pytest.raises(ValueError, match="step is 9; recorded steps are none yet"):
        Recorder(4, 4).at(9)
    with pytest.raises(ValueError, match=r"step is 0; recorded steps are 1 … \d+"):
        pressed().recorder.at(0)


def test_jsonl_reads_back_event_for_event(tmp_path):
    recorder = pressed(num_host_blocks=8, prefix_cache=True, decode=lambda ids: "".join(f"<{i}>" for i in ids)).recorder
    recorder.save(tmp_path / "run.jsonl")
    loaded = Recording.load(tmp_path / "run.jsonl")
    assert [(e.step, e.kind, e.request, e.blocks, e.detail) for e in loaded.events()] == [
        (e.step, e.kind, e.request, e.blocks, e.detail) for e in recorder.events()
    ]
    for step in recorder.steps:
        ours, theirs = recorder.at(step), loaded.at(step)
        assert (ours.blocks, ours.requests, ours.queues, ours.pool_free) == (
            theirs.blocks, theirs.requests, theirs.queues, theirs.pool_free,
        )  # fmt: skip
        assert ours.time == pytest.approx(theirs.time, abs=1e-5)
    assert loaded.spans() == recorder.spans()
    assert loaded.text([100, 101]) == "<100><101>"


@pytest.mark.parametrize("name", ["🦙" * 3, "x" * 200, "<script>alert(1)</script>", "line\u2028break\n", "\ud800"])
def test_jsonl_keeps_odd_names(tmp_path, name):
    engine = ToyEngine()
    engine.add(name, 5, 2)
    engine.run().recorder.save(tmp_path / "run.jsonl")
    assert [span.request_id for span in Recording.load(tmp_path / "run.jsonl").spans()] == [name] * 2


def test_jsonl_refuses_files_that_are_not_whole_flight_records(tmp_path):
    whole = tmp_path / "run.jsonl"
    pressed().recorder.save(whole)
    lines = whole.read_text().splitlines(keepends=True)

    def refused(content: str | bytes) -> str:
        path = tmp_path / "bad.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ValueError) as error:
            Recording.load(path)
        assert "\n" not in str(error.value) and "bad.jsonl" in str(error.value)
        return str(error.value)

    for foreign in ("", "\n", "hello", "[1]", '{"a": 1}', b"\x89PNG\xff\xfe"):
        assert "is not a labcore flight record" in refused(foreign)
    assert "cut short" in refused("".join(lines[:-1]))
    assert "cut short" in refused("".join(lines)[:-40])
    assert "cut short" in refused("".join(lines[:3] + lines[4:]))
    assert "version 9" in refused(lines[0].replace('"version":2', '"version":9') + "".join(lines[1:]))
    older = lines[0].replace('"version":2', '"version":1') + "".join(lines[1:])
    assert "has format version 1, this labcore reads 2" in refused(older)
    assert "line 3" in refused("".join(lines[:2] + ['{"step": 2, "nonsense": 1}\n'] + lines[3:]))
    assert "line 3" in refused("".join(lines[:2] + ["half a li\n"] + lines[3:]))


def test_recorder_and_figures_need_no_torch():
    code = "import sys, labcore.recorder, labcore.viz, labcore.viz.engine_control; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_span_refuses_unknown_states_and_negative_lengths():
    assert Span("ana", 0, 2, "idle").stop == 2
    with pytest.raises(ValueError, match="state is 'sleep'"):
        Span("ana", 0, 1, "sleep")
    with pytest.raises(ValueError, match="stop is 1; it must be at least start, 3"):
        Span("ana", 3, 1, "decode")


def busy(steps: int, record: bool = True) -> ToyEngine:
    """64 requests always running, fresh ones joining as others end."""
    engine = ToyEngine(64 * 40, 16, budget=2048, max_seqs=64, record=record)
    for i in range(64 + steps * 64 // 200):
        engine.add(f"request-{i}", 100 + i % 50, 150 + i % 100)
    return engine.run(steps)


def test_recorder_size_of_ten_thousand_steps_is_below_50_megabytes(tmp_path):
    steps = 500

    def memory(record: bool) -> tuple[int, ToyEngine]:
        tracemalloc.start()
        engine = busy(steps, record)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used, engine

    used, engine = memory(True)
    assert len(engine.recorder.steps) == steps
    assert (used - memory(False)[0]) * 10_000 / steps < 50e6
    path = tmp_path / "run.jsonl"
    engine.recorder.save(path)
    assert path.stat().st_size * 10_000 / steps < 50e6


def test_jsonl_has_one_object_per_line(tmp_path):
    pressed().recorder.save(tmp_path / "run.jsonl")
    header, *steps, end = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert (header["format"], header["version"], end) == ("labcore-recording", 2, {"end": len(steps)})
