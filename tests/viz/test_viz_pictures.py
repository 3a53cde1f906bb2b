"""Every picture shows what the record says: tested on the figures' data, in the figure and in every frame."""

from __future__ import annotations

import json

import numpy as np
import plotly.graph_objects as go
import pytest
from figure_data import at_step, merged, typed_arrays, values
from toy_engine import ToyEngine

from labcore.recorder import Recorder, Recording, Span
from labcore.viz import block_map, block_tables, memory, queues, text_view, timeline
from labcore.viz.figure import BUDGET, PLOTLY_MIME, sample, stored_size
from labcore.viz.memory import BANDS, memory_point
from labcore.viz.style import PALETTE, SPANS, colour, letter, safe, short

PICTURES = [block_map, block_tables, timeline, memory, queues]
ODD_NAMES = ["🦙🦙", "x" * 200, "<script>alert(1)</script>", "<b>bold</b>", "$\\alpha$", "%{x}", 'a"b', "line\nbreak"]
WORDS = [" You", " are", " a", " helpful", "\n", "<i>", " $x$", " memory"]


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i % len(WORDS)] for i in ids)


def small(**kw) -> Recording:
    """Four requests: a shared prefix, a preemption, cached blocks, partly filled ones."""
    engine = ToyEngine(10, 4, budget=12, max_seqs=4, prefix_cache=True, decode=decode, **kw)
    for name, prompt, outputs in (("ana", 9, 8), ("bo", 9, 10), ("cy", 14, 3), ("dee", 3, 6)):
        engine.add(name, prompt, outputs)
    return engine.run().recorder


def big() -> Recording:
    engine = ToyEngine(1000, 16, budget=512, max_seqs=40, prefix_cache=True, decode=decode)
    for i in range(200):
        engine.add(f"request-{i}", [*range(64), *range(1000 + i * 300, 1060 + i * 300 + i * 7 % 300)], 60 + i % 120)
    return engine.run(500).recorder


@pytest.fixture(scope="module")
def recording() -> Recording:
    return small()


@pytest.fixture(scope="module")
def large() -> Recording:
    return big()


def labels(cells: dict, letters: dict) -> list[str]:
    """What is written on each cell: on the cell itself, or on top of the cover of a partly filled one."""
    on_top = dict(zip(letters["x"], letters["text"], strict=True))
    return [text or on_top.get(x, "") for x, text in zip(cells["x"], cells["text"], strict=True)]


def test_block_map_shows_owner_fill_and_state_of_every_block_at_every_step(recording):
    figure = block_map(recording).data_json()
    assert [frame["name"] for frame in figure["frames"]] == [str(step) for step in recording.steps]
    seen = set()
    for step in recording.steps:
        snapshot = recording.at(step)
        cells, hatches, covers, letters = at_step(figure, step)[:4]
        fills, hovers = cells["marker"]["color"], cells["hovertext"]
        for block, fill, label, hover in zip(snapshot.blocks, fills, labels(cells, letters), hovers, strict=True):
            numbers = [snapshot.requests[name].number for name, _ in block.owners]
            expected = "".join(map(letter, numbers)) if numbers else "#" if block.state == "cached" else ""
            assert label == expected
            assert fill == (colour(numbers[0]) if numbers else "#ddd" if block.state == "cached" else "#fff")
            for part in (f"block {block.block}</b> · {block.state}", *(name for name, _ in block.owners)):
                assert part in hover
            if block.owners:
                assert f"refcount {block.refcount} · {len(block.tokens)}/4 tokens" in hover
                assert safe(short(decode(block.tokens), 60)) in hover
            if block.hash:
                assert block.hash[:16] in hover
            seen.add(block.state)
        patterns = dict(zip(hatches["x"], hatches["marker"]["pattern"]["shape"], strict=False))
        for block in snapshot.blocks:
            wanted = {"shared": "/", "cached": "."}.get(block.state)
            assert patterns.get(cells["x"][block.block]) == wanted
        partial = [block for block in snapshot.blocks if block.state != "free" and 0 < len(block.tokens) < 4]
        assert sorted(x for x in covers["x"] if x is not None) == sorted(cells["x"][b.block] for b in partial)
        assert sorted(y for y in covers["y"] if y is not None) == sorted(4 - len(b.tokens) for b in partial)
    assert seen == {"free", "cached", "owned", "shared"}


def test_block_map_shows_the_owner_of_block_7():
    engine = ToyEngine(10, 4, budget=64)
    for prompt in (9, 10, 9):
        engine.add(f"request {engine.step_number + len(engine.waiting)}", prompt, 3)
    figure = block_map(engine.run().recorder, 1).data_json()
    cells = at_step(figure, 1)[0]
    assert values(cells["text"])[7] == letter(2) == "C"
    assert "request 2, logical block 1" in values(cells["hovertext"])[7]


def test_figure_and_slider_start_at_the_given_step(recording):
    for draw in PICTURES:
        figure = draw(recording, step=3).data_json()
        slider = figure["layout"]["sliders"][0]
        assert slider["steps"][slider["active"]]["label"] == "3"
        if draw is not timeline:
            assert figure["layout"]["title"]["text"].startswith("step 3 ")
        for trace, shown in zip(figure["data"], at_step(figure, 3), strict=True):
            assert trace == shown


def test_block_tables_names_every_entry_and_points_to_its_block(recording):
    figure = block_tables(recording).data_json()
    for step in recording.steps:
        tables = recording.at(step).tables
        traces = at_step(figure, step)
        pool, entries, arrows = traces[0], traces[4], traces[9]
        listed = [block for blocks in tables.values() for block in blocks]
        middles = [base + 2 for base in entries["base"]]
        covered = dict(zip(zip(traces[7]["x"], traces[7]["y"], strict=True), traces[7]["text"], strict=True))
        texts = zip(entries["x"], middles, entries["text"], strict=True)
        written = [text or covered[x, y] for x, y, text in texts]
        assert written == [str(block) for block in listed]
        places = dict(zip(zip(pool["x"], pool["base"], strict=True), pool["text"], strict=True))
        on_top = zip(*(traces[3][key] for key in ("x", "y", "text")), strict=True)
        places |= {(x, y - 2): text for x, y, text in on_top if text}
        targets = list(zip(arrows["x"][1::3], arrows["y"][1::3], strict=True))
        assert len(targets) == len(listed)
        for (x, y), block in zip(targets, listed, strict=True):
            owner = places[(x, round(y - 4, 3))]
            names = [recording.at(step).requests[name].number for name, _ in recording.at(step).blocks[block].owners]
            assert owner == "".join(map(letter, names))
        ticks = next(f for f in figure["frames"] if f["name"] == str(step))["layout"]["yaxis"]["ticktext"]
        names = [f"{letter(recording.at(step).requests[name].number)} {name}" for name in tables]
        assert ticks[: len(tables)] == names


def test_block_tables_shorten_long_and_many_tables(large):
    facts = text_view(large, 150, "block_tables")
    figure = block_tables(large, 150, steps=[150]).data_json()
    assert "… and 32 more" in figure["layout"]["yaxis"]["ticktext"]
    assert "…" in facts and "40 tables list" in facts
    assert len(figure["data"][4]["text"]) == 8 * 11


@pytest.mark.parametrize(("stop", "ticks"), [(1, "dtick"), (5, "dtick"), (12, "dtick"), (13, "nticks"), (2.5, "nticks")])
def test_timeline_of_few_steps_labels_whole_steps_only(stop, ticks):
    axis = timeline([Span("ana", 0, stop, "decode")]).data_json()["layout"]["xaxis"]
    assert ticks in axis and axis[ticks] == {"dtick": 1, "nticks": 12}[ticks]


def test_timeline_holds_every_span_once():
    recording = small()
    figure = timeline(recording).data_json()
    drawn = set()
    for trace in figure["data"]:
        if trace["type"] == "bar":
            state = trace["name"].split()[1]
            assert trace["text"] == SPANS[state][0] == trace["name"].split()[0]
            for start, length, row in zip(trace["base"], trace["x"], trace["y"], strict=True):
                drawn.add((figure["layout"]["yaxis"]["ticktext"][row], start, start + length, state))
    assert drawn == {(s.request_id, s.start, s.stop, s.state) for s in recording.spans()}
    assert {state for *_, state in drawn} >= {"waiting", "prefill", "decode", "preempted"}


def test_timeline_runs_share_one_scale(recording):
    static = [Span("ana", 0, 4, "prefill"), Span("ana", 4, 30, "decode"), Span("bo", 4, 30, "idle")]
    picture = timeline(static, recording, titles=["static", "continuous"])
    layout = picture.data_json()["layout"]
    assert layout["xaxis"]["range"] == layout["xaxis2"]["range"] == [0, 30]
    assert layout["xaxis"]["domain"][1] < layout["xaxis2"]["domain"][0]
    assert [note["text"] for note in layout["annotations"]] == ["<b>static</b>", "<b>continuous</b>"]
    assert picture.text.startswith("static: 2 requests") and "\ncontinuous: 4 requests" in picture.text
    seconds = timeline([Span("ana", 0.25, 1.5, "decode")]).data_json()
    assert [bar["x"] for bar in seconds["data"] if bar["type"] == "bar"] == [[1.25]]


def test_memory_bands_add_up_to_the_pool_and_to_what_the_blocks_hold(recording):
    figure = memory(recording).data_json()
    bands = {trace["name"]: trace["y"][:-1] for trace in figure["data"] if trace.get("name") in BANDS}
    assert [sum(column) for column in zip(*bands.values(), strict=True)] == [40] * len(recording.steps)
    for index, step in enumerate(recording.steps):
        snapshot = recording.at(step)
        held = {block.block: len(block.tokens) for block in snapshot.blocks if block.owners}
        assert bands["used"][index] + bands["shared"][index] == sum(held.values())
        assert bands["wasted"][index] == 4 * len(held) - sum(held.values())
        point = memory_point(recording, snapshot)
        assert point.saved == sum((b.refcount - 1) * len(b.tokens) for b in snapshot.blocks if b.owners)
    dashed = next(trace for trace in figure["data"] if "contiguous" in trace.get("name", ""))
    assert dashed["y"][0] == 64 * len(recording.at(1).queues["running"])


def test_queues_show_waiting_and_running_requests(recording):
    figure = queues(recording).data_json()
    for index, step in enumerate(recording.steps):
        snapshot = recording.at(step)
        chips = at_step(figure, step)[4]
        for row, name in enumerate(("running", "swapped", "waiting")):
            here = [text for text, base in zip(chips["text"], chips["base"], strict=True) if base == -row - 0.85]
            assert here == [letter(snapshot.requests[r].number) for r in snapshot.queues[name]]
            trace = next(t for t in figure["data"] if t.get("name") == name)
            assert trace["y"][index] == len(snapshot.queues[name])


def test_figures_show_every_event_of_the_record():
    """Swapped and preempted requests, copies and evictions included."""
    swapped = small(num_host_blocks=12)
    assert any("swapped" in line for line in text_view(swapped, figure="timeline").splitlines())
    out = next(event for event in swapped.events() if event.kind == "swap_out")
    assert [line.split()[2] for line in text_view(swapped, out.step, "queues").splitlines() if line[:4] == "swap"] == [
        out.request
    ]
    engine = ToyEngine(12, 4)
    ana = engine.add("ana", 6, 6)
    engine.step()
    engine.fork(ana, "ana/1")
    engine.step()
    assert "refcount 2" in text_view(engine.recorder, 2)
    assert engine.recorder.at(2).tables == {"ana": [0, 2], "ana/1": [0, 1]}
    figure = block_map(engine.recorder, 2).data_json()
    assert labels(*figure["data"][0:4:3])[:3] == ["AB", "B", "A"]


@pytest.mark.parametrize("draw", PICTURES)
def test_figure_of_an_empty_run_and_of_a_single_request(draw):
    empty = draw(Recorder(4, 4))
    assert empty.text in ("nothing recorded yet", "0 requests, ends at 0; request-steps: none")
    json.dumps(empty.data_json())
    engine = ToyEngine(4, 4)
    engine.add("solo", 3, 1)
    picture = draw(engine.run().recorder)
    assert picture.text and json.dumps(picture.data_json())


@pytest.mark.parametrize("draw", PICTURES)
def test_figure_escapes_odd_names(draw):
    engine = ToyEngine(40, 4, max_seqs=12)
    for name in ODD_NAMES:
        engine.add(name, 5, 3)
    picture = draw(engine.run(2).recorder)
    figure = picture.data_json()
    figure["layout"]["meta"] = None  # the facts, which are text and not drawn
    drawn = json.dumps(figure, ensure_ascii=False)
    for markup in ("<script", "</script", "<b>bold", "$\\\\alpha$", "line\\nbreak", "x" * 61):
        assert markup not in drawn
    assert picture.text and "\u2028" not in picture.text
    assert not any("<script" in str(trace.get("hovertemplate")) for trace in figure["data"])


@pytest.mark.parametrize("draw", PICTURES)
def test_figure_drawn_twice_has_the_same_bytes_and_no_ids(draw):
    first, second = (json.dumps(draw(small(clock=iter_clock(seed))).data_json()) for seed in (1, 2))
    assert first == second
    assert '"uid"' not in first


def iter_clock(seed: int):
    """A clock that runs differently for every seed: times must not show."""
    ticks = iter(range(0, 10**9, seed * 7))
    return lambda: next(ticks)


@pytest.mark.parametrize("draw", PICTURES)
def test_figure_is_stored_as_plotly_json_and_text(draw, recording):
    picture = draw(recording)
    assert isinstance(picture, go.Figure)
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {PLOTLY_MIME, "text/plain"}
    assert bundle["text/plain"] == picture.text
    assert typed_arrays(bundle[PLOTLY_MIME]) == 0
    assert "plotly.js" not in json.dumps(bundle)
    ink = bundle[PLOTLY_MIME]["layout"]
    assert ink["paper_bgcolor"].startswith("#fb") and ink["font"]["color"] == "#1c1c1c"


@pytest.mark.parametrize("draw", PICTURES)
def test_figure_of_a_thousand_blocks_and_500_steps_is_below_half_a_megabyte(draw, large):
    picture = draw(large, step=150)
    assert stored_size(picture._repr_mimebundle_()[PLOTLY_MIME], depth=6) < 500_000
    names = [int(frame["name"]) for frame in picture.data_json()["frames"]]
    assert names[0] == 1 and names[-1] == 500 and 150 in names and len(names) >= 7


def test_figure_steps_can_be_chosen(large):
    frames = block_map(large, steps=range(200, 206)).data_json()["frames"]
    assert [frame["name"] for frame in frames] == ["200", "201", "202", "203", "204", "205"]
    one = block_map(large, 200, steps=[200]).data_json()
    assert not one.get("frames") and "sliders" not in one["layout"]
    assert "logical block" in one["data"][0]["hovertext"][0], "a single step tells everything about a block"


def test_a_step_that_was_not_recorded_is_refused(recording):
    last = recording.steps[-1]
    for draw in (block_map, block_tables, memory, queues):
        with pytest.raises(ValueError, match=f"step is 99; recorded steps are 1 … {last}"):
            draw(recording, 99)
        with pytest.raises(ValueError, match="step is 0"):
            draw(recording, steps=[0, 1])
    with pytest.raises(ValueError, match="figure is 'pool'; it must be one of 'block_map'"):
        text_view(recording, figure="pool")


def test_text_view_is_the_text_of_the_figure(recording):
    for draw in (block_map, block_tables, memory, queues):
        assert draw(recording, 3).text == text_view(recording, 3, draw.__name__)
    assert timeline(recording).text == text_view(recording, figure="timeline") == text_view(recording.spans())
    facts = text_view(recording, 3)
    assert repr(facts) == str(facts), "a cell shows it as it is"
    snapshot = recording.at(3)
    first, *blocks = facts.splitlines()
    assert first.startswith(f"step 3   10 blocks: {snapshot.count('owned')} owned, {snapshot.count('shared')} shared")
    assert len(blocks) == 10 - snapshot.count("free")


def test_leaked_blocks_are_mentioned():
    engine = ToyEngine()
    engine.add("ana", 5, 2)
    engine.pool.allocate(3)
    engine.step()
    assert "7 free, 3 taken by no request" in text_view(engine.recorder, 1)


def test_figure_of_a_loaded_record_is_the_same(recording, tmp_path):
    recording.save(tmp_path / "run.jsonl")
    loaded = Recording.load(tmp_path / "run.jsonl")
    for draw in PICTURES:
        assert draw(loaded, step=4).data_json() == draw(recording, step=4).data_json()


def test_letters_are_unique_and_colours_are_safe():
    assert [letter(n) for n in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
    assert len({letter(n) for n in range(2000)}) == 2000

    def luminance(short_hex: str) -> float:
        channels = [int(c * 2, 16) / 255 for c in short_hex[1:]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ink = 0.0116  # of #1c1c1c
    assert all((luminance(fill) + 0.05) / (ink + 0.05) > 4.5 for fill in (*PALETTE, *(s[1] for s in SPANS.values())))


def test_names_are_cut_and_made_safe():
    assert short("x" * 30, 10) == "x" * 9 + "…"
    assert short("a\nb\tc\x00") == "a↵b·c·"
    assert safe("<b>&$x$") == "&lt;b&gt;&amp;&#36;x&#36;"


def test_sample_keeps_both_ends_and_the_given_step():
    steps = list(range(1, 501))
    for limit in (2, 3, 7, 60):
        picked = sample(steps, limit, 123)
        assert len(picked) <= max(limit, 3) and picked == sorted(picked)
        assert picked[-1] == 500 and 123 in picked
    assert sample([1, 2, 3], 60) == [1, 2, 3]
    assert BUDGET < 500_000


def test_figure_values_are_the_same_from_lists_and_from_typed_arrays():
    """plotly stores a numpy array as base64 and a list as a list; a test that looks into a figure must read both."""
    big_ids = [2**40 + 1, 2**53 - 1, 7]
    figures = [go.Figure(go.Bar(y=array)) for array in (big_ids, np.array(big_ids))]
    for figure in figures:
        assert values(json.loads(figure.to_json())["data"][0]["y"]) == big_ids
    assert merged({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}}
