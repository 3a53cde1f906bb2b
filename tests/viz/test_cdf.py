"""Spread lines: every request is a step of its line, lines differ by more than colour, and the words say the same."""

from __future__ import annotations

import pytest

from labcore.viz.cdf import cdf

SAMPLES = {"static": [9, 1, 5, 5], "<b>ours</b>": [1, 1, 2, 4]}


def test_cdf_rises_by_one_request_at_each_value():
    trace = cdf(SAMPLES, "steps").data_json()["data"][0]
    assert trace["x"] == [0, 1, 5, 5, 9] and trace["y"] == [0, 0.25, 0.5, 0.75, 1.0]


def test_cdf_lines_differ_in_dash_and_marker_and_not_only_in_colour():
    traces = cdf(SAMPLES, "steps").data_json()["data"]
    assert len({trace["line"]["dash"] for trace in traces}) == len({trace["marker"]["symbol"] for trace in traces}) == 2


def test_cdf_text_gives_percentiles_and_mean():
    assert cdf(SAMPLES, "steps").text.splitlines() == [
        "static        P50      5   P90      9   P99      9   mean      5   steps",
        "<b>ours</b>   P50      1   P90      4   P99      4   mean      2   steps",
    ]


def test_a_name_with_markup_is_shown_and_not_obeyed():
    assert cdf(SAMPLES, "steps").data_json()["data"][1]["name"] == "&lt;b&gt;ours&lt;/b&gt;"


def test_cdf_refuses_too_many_names_and_empty_samples():
    with pytest.raises(ValueError, match="at most 4"):
        cdf({"a": []}, "steps")
    with pytest.raises(ValueError, match="at most 4"):
        cdf({name: [1.0] for name in "abcde"}, "steps")
