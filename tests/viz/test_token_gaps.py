"""The gaps picture: a stroke for each token, a bar for each long gap and for no other, and the words say the same."""

from __future__ import annotations

import pytest
from toy_engine import ToyEngine

from labcore.viz.token_gaps import lengths, token_gaps, token_gaps_text

WHOLE = {"s0": [1, 2, 3, 10, 11], "<b>s1</b>": [1, 2, 3, 10, 11]}
PIECES = {"s0": [1, 2, 3, 4.5, 6, 7], "<b>s1</b>": [1, 2, 3, 4.5, 6, 7]}


def panels(picture):
    """(bars, strokes, lines) of each panel."""
    traces = picture.data_json()["data"]
    return [traces[i : i + 3] for i in range(0, len(traces), 3)]


def test_token_gaps_draws_one_tick_per_token_in_its_row():
    _, strokes, _ = panels(token_gaps(WHOLE))[0]
    assert strokes["x"] == [1, 2, 3, 10, 11] * 2 and strokes["y"] == [0] * 5 + [1] * 5
    assert strokes["marker"]["symbol"] == "line-ns"


def test_token_gaps_longer_than_twice_the_median_are_bars():
    (bars, _, _), (none, _, _) = panels(token_gaps(WHOLE, PIECES))
    assert (bars["y"], bars["base"], bars["x"], bars["text"]) == ([0, 1], [3, 3], [7, 7], ["7", "7"])
    assert bars["marker"]["pattern"]["shape"] == "/"
    assert none["x"] == [None]


def test_token_gaps_narrow_bars_have_no_label():
    bars, _, _ = panels(token_gaps({"s0": [0, 1, 2, 5, 200]}))[0]
    assert bars["x"] == [3, 195] and bars["text"] == ["", "195"]


def test_token_gaps_threshold_can_be_given():
    bars, _, _ = panels(token_gaps(PIECES, long=1.2))[0]
    assert bars["x"] == [1.5] * 4


def test_token_gaps_panels_share_one_scale_and_do_not_overlap():
    layout = token_gaps(WHOLE, PIECES, WHOLE).data_json()["layout"]
    axes = [layout[f"xaxis{suffix}"] for suffix in ("", "2", "3")]
    assert axes[0]["range"] == axes[1]["range"] == axes[2]["range"] and 0 < axes[0]["range"][0] < 1
    domains = [layout[f"yaxis{suffix}"]["domain"] for suffix in ("", "2", "3")]
    assert all(low < high for low, high in domains)
    assert all(upper[0] > lower[1] for upper, lower in zip(domains, domains[1:], strict=False))


def test_token_gaps_marks_are_lines_across_their_panel():
    picture = token_gaps(WHOLE, PIECES, titles=["a", "b"], marks=[{}, {"<i>it comes</i>": 3}])
    assert panels(picture)[0][2]["x"] == [None] and panels(picture)[1][2]["x"] == [3, 3, None]
    notes = {note["text"]: note for note in picture.data_json()["layout"]["annotations"]}
    assert notes["&lt;i&gt;it comes&lt;/i&gt;"]["xref"] == "x2" and notes["<b>a</b>"]["xref"] == "x"


def test_token_gaps_text_gives_every_run_and_every_stream():
    marks = [{"it comes": 3}]
    assert token_gaps(WHOLE, titles=["whole"], marks=marks, unit="ticks").text.splitlines() == [
        "whole: 2 streams, 8 gaps: median 1, P99 7, longest 7 ticks; 2 longer than 2",
        "  3  it comes",
        "  s0         5 tokens, longest gap 7 ticks (3 – 10)",
        "  <b>s1</b>  5 tokens, longest gap 7 ticks (3 – 10)",
    ]
    assert "s1  1 token" in token_gaps_text({"s0": [1, 2], "s1": [5]})
    assert "… and 3 more" in token_gaps_text({f"s{i}": [0, 1] for i in range(43)})


def test_a_name_with_markup_is_shown_and_not_obeyed():
    assert token_gaps(WHOLE).data_json()["layout"]["yaxis"]["ticktext"][1] == "&lt;b&gt;s1&lt;/b&gt;"


def test_token_gaps_without_gaps_is_refused():
    for runs in ((), ({},), (WHOLE, {"s0": [1]})):
        with pytest.raises(ValueError, match="at least one, each with a stream of two tokens"):
            token_gaps(*runs)


def test_token_times_of_a_record_are_the_ends_of_steps():
    engine = ToyEngine(10, 4, budget=12, max_seqs=4)
    for name, prompt, outputs in (("ana", 9, 8), ("bo", 9, 10), ("cy", 14, 3)):
        engine.add(name, prompt, outputs)
    film = engine.run().recorder
    times = film.token_times()
    assert {name: len(row) for name, row in times.items()} == {"ana": 8, "bo": 10, "cy": 3}
    assert all(row == sorted(row) for row in times.values()) and min(lengths(times)) >= 0
    ends = {record.start + record.duration for record in film.records}
    assert {time for row in times.values() for time in row} <= ends
    token_gaps(times)
