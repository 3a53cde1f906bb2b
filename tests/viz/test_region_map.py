"""The slab map: boxes lie where the regions lie, are shaded as far as the tokens go, and say so in words."""

from __future__ import annotations

import json

from labcore.baseline.naive import simulate_first_fit
from labcore.viz.region_map import region_map
from labcore.workload.traces import TraceRequest, load_trace

LOG = [TraceRequest(0, 3, 1), TraceRequest(0, 3, 4), TraceRequest(0, 3, 2)]
NAMES = ["ana", "bo", "<b>cy</b>"]


def drawn(names=NAMES):
    stays = simulate_first_fit(LOG, num_slots=14, reserve=lambda request: 7)
    return region_map(stays, 14, names).data_json()


def outlines(trace):
    """The corners of each polygon of a trace, without the point that closes it."""
    shapes, corners = [], []
    for x, y in [*zip(trace["x"], trace["y"], strict=True), (None, None)]:
        if x is None:
            shapes.append(corners[:-1])
            corners = []
        else:
            corners.append((x, y))
    return shapes


def test_region_map_box_covers_the_region_while_resident():
    assert outlines(drawn()["data"][0]) == [
        [(0, 0), (0, 7), (1, 7), (1, 0)],
        [(0, 7), (0, 14), (4, 14), (4, 7)],
        [(1, 0), (1, 7), (3, 7), (3, 0)],
    ]


def test_region_map_shading_goes_from_the_prompt_to_the_last_stored_token():
    assert outlines(drawn()["data"][1])[1] == [(0, 7), (0, 10), (4, 13), (4, 7)]


def test_region_map_text_says_what_the_boxes_show():
    stays = simulate_first_fit(LOG, num_slots=14, reserve=lambda request: 7)
    assert repr(region_map(stays, 14, ["ana", "bo", "cy"]).text).splitlines() == [
        "14 slots, 3 requests, 4 steps",
        "  ana  slots 0–6   steps 0–0   3 tokens grow to 3 of 7",
        "  bo   slots 7–13   steps 0–3   3 tokens grow to 6 of 7",
        "  cy   slots 0–6   steps 1–2   3 tokens grow to 4 of 7",
    ]


def test_a_name_with_markup_is_shown_and_not_obeyed():
    figure = drawn()
    assert figure["data"][2]["text"][2] == "&lt;b&gt;cy&lt;/b&gt;"
    assert "<b>" not in figure["data"][2]["hovertext"][2]


def test_region_map_of_no_and_of_many_requests_stays_small():
    assert repr(region_map([], 12).text) == "12 slots, 0 requests, 0 steps"
    stays = simulate_first_fit(load_trace()[:200], 1 << 15, lambda request: request.prompt_tokens + request.output_tokens)
    figure = region_map(stays, 1 << 15)
    assert len(json.dumps(figure.data_json())) < 60_000
    assert repr(figure.text).splitlines()[0] == "32,768 slots, 200 requests, 2,690 steps"


def test_region_map_text_counts_free_slots_by_hole():
    stays = simulate_first_fit(LOG, num_slots=14, reserve=lambda request: 5)
    assert repr(region_map(stays, 14).text).splitlines() == [
        "14 slots, 3 requests, 4 steps",
        "  step     0        4 slots free, 1 holes, the largest 4",
        "  step     1        4 slots free, 1 holes, the largest 4",
        "  step     2        4 slots free, 1 holes, the largest 4",
        "  step     3        9 slots free, 2 holes, the largest 5",
    ]
