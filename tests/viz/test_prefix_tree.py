"""The prefix tree's picture: one row a text, children right of their parents, and the same in words."""

from __future__ import annotations

import pytest

from labcore.course.learner.text_engine import TextEngine
from labcore.recorder import Recorder
from labcore.viz.prefix_tree import prefix_tree, tree


@pytest.fixture
def desk():
    desk = TextEngine(num_blocks=12)
    desk.submit("ana", "the sea is calm", output=3)
    desk.step()
    desk.submit("bo", "the sea is wild", output=3)
    desk.submit("cy", "the cat is calm", output=3)
    desk.step()
    return desk


def test_prefix_tree_rows_branch_where_texts_diverge(desk):
    places = {node.block.block: (node.parent, node.depth, node.row) for node in tree(desk.recorder, 2)}
    assert places == {
        0: (None, 0, 0), 1: (0, 1, 0), 2: (1, 2, 0), 3: (2, 3, 0), 4: (1, 2, 1), 6: (0, 1, 2), 7: (6, 2, 2),
    }  # fmt: skip


def test_prefix_tree_text_says_what_the_tree_shows(desk):
    assert str(prefix_tree(desk.recorder).text).splitlines() == [
        "step 2   7 blocks can be found, in 3 texts",
        "block 0           “the ”  ana(0) bo(0) cy(0)",
        "   block 1        “sea ”  ana(1) bo(1)",
        "      block 2     “is c”  ana(2)",
        "         block 3  “almi”  ana(3)",
        "      block 4     “is w”  bo(2)",
        "   block 6        “cat ”  cy(1)",
        "      block 7     “is c”  cy(2)",
    ]


def test_prefix_tree_cells_are_blocks_of_the_pool_below(desk):
    traces = prefix_tree(desk.recorder).data_json()["data"]
    names = [trace["text"] for trace in traces if trace["type"] == "bar" and trace.get("text")]
    assert names[0] == ["0", "1", "2", "3", "4", "6", "7"]
    assert names[1][:3] == ["ABC", "AB", "A"] and len(names[1]) == 12


def test_prefix_tree_keeps_cached_blocks_until_eviction(desk):
    desk.run()
    assert {node.block.state for node in tree(desk.recorder, desk.recorder.steps[-1])} == {"cached"}
    desk.submit("stranger", "x" * 40)
    desk.run()
    left = tree(desk.recorder, desk.recorder.steps[-1])
    assert [node.block.block for node in left if "x" not in desk.recorder.text(node.block.tokens)] == [
        0, 6
    ]  # fmt: skip


def test_prefix_tree_of_an_empty_record_or_cache_is_a_figure():
    assert prefix_tree(Recorder(4, 4)).text == "nothing recorded yet"
    desk = TextEngine(num_blocks=4)
    desk.submit("a", "abc")
    desk.step()
    assert str(prefix_tree(desk.recorder).text) == "0 blocks can be found, in 0 texts"
