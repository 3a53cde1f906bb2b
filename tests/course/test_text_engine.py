"""The desk of the exercises: it serves as the engine does, and notices whoever reads what is not their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labcore.course.learner.text_engine import TextEngine
from labcore.kvcache.prefix import HashedPrefixCache, NoPrefixCache


class TooEager(HashedPrefixCache):
    """Never forgets what a block held."""

    def evict(self, blocks):
        pass


def test_what_follows_a_text_depends_on_the_text_alone():
    texts = {"ana": "the sea is calm", "bo": "the sea is wild", "cy": "the sea is calm"}
    said = []
    for cache, num_blocks in ((NoPrefixCache, 20), (HashedPrefixCache, 20), (HashedPrefixCache, 8)):
        desk = TextEngine(cache, num_blocks=num_blocks, budget=6)
        for name, text in texts.items():
            desk.submit(name, text, output=9)
        said.append(desk.run())
        assert desk.foreign_reads == []
    assert said[0] == said[1] == said[2] and said[0]["ana"] == said[0]["cy"] != said[0]["bo"]


def test_reading_foreign_kv_is_noticed_by_name():
    desk = TextEngine(TooEager, num_blocks=4)
    for name, text in (("x", "aaaabbbb."), ("y", "ccccddddeeeeff"), ("x again", "aaaabbbb.")):
        desk.submit(name, text)
        desk.run()
    assert desk.foreign_reads == ["x again's letter 0 reads 'ccccddddeeeef', should read 'a'"]


def test_requests_without_an_end_are_an_error(monkeypatch):
    monkeypatch.setattr("labcore.course.learner.text_engine.MAX_STEPS", 100)
    desk = TextEngine(num_blocks=1000)
    desk.submit("long", "a", output=110)
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        desk.run()


@pytest.mark.parametrize(
    ("name", "text", "output", "said"),
    [
        ("ana", "the cat", 1, "name is 'ana', which is in use"),
        ("bo", "", 1, "text has 0 letters; with 1 to follow it must have 1 … 8."),
        ("bo", "the cats", 2, "text has 8 letters; with 2 to follow it must have 1 … 7."),
    ],
)
def test_request_that_the_desk_cannot_serve_is_refused_by_name(name, text, output, said):
    desk = TextEngine(num_blocks=2)
    desk.submit("ana", "the sea")
    with pytest.raises(ValueError, match=said):
        desk.submit(name, text, output)
    assert list(desk.run()) == ["ana"] and desk.foreign_reads == []


def test_the_module_needs_no_torch():
    code = "import sys, labcore.course.learner.text_engine; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
