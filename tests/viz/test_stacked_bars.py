"""Share bars: lengths are the shares, every bar is told apart by more than its colour, and the words say the same."""

from __future__ import annotations

import pytest

from labcore.viz.stacked_bars import stacked_bars

ROWS = {
    "reserve": {"tokens": 0.159, "reserved": 0.841, "free": 0.0},
    "<b>paged</b>": {"tokens": 0.978, "reserved": 0.006, "free": 0.016},
}


def test_stacked_bars_are_as_long_as_their_shares():
    traces = stacked_bars(ROWS).data_json()["data"]
    assert [trace["name"] for trace in traces] == ["tokens", "reserved", "free"]
    assert traces[0]["x"] == [0.159, 0.978]
    assert traces[2]["x"] == [0.0, 0.016]


def test_stacked_bars_differ_in_pattern_and_not_only_in_colour():
    patterns = [trace["marker"]["pattern"]["shape"] for trace in stacked_bars(ROWS).data_json()["data"]]
    assert len(set(patterns)) == 3


def test_stacked_bars_text_has_numbers_of_narrow_shares():
    picture = stacked_bars(ROWS)
    assert picture.data_json()["data"][1]["text"] == ["84.1%", ""]
    assert picture.text.splitlines() == [
        "reserve        tokens  15.9 %   reserved  84.1 %   free   0.0 %",
        "<b>paged</b>   tokens  97.8 %   reserved   0.6 %   free   1.6 %",
    ]


def test_a_name_with_markup_is_shown_and_not_obeyed():
    assert stacked_bars(ROWS).data_json()["data"][0]["y"][1] == "&lt;b&gt;paged&lt;/b&gt;"


def test_stacked_bars_refuse_unequal_parts_and_draw_no_rows():
    with pytest.raises(ValueError, match="same parts"):
        stacked_bars({"a": {"x": 1.0}, "b": {"y": 1.0}})
    assert stacked_bars({}).text == ""
