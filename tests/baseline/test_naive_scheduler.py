"""The naive scheduler keeps its faults: they are what the course's own is measured against."""

import pytest

from labcore.baseline.naive import NaiveRequest, NaiveScheduler


def serve(num_blocks, *requests, late=(), steps=50):
    scheduler = NaiveScheduler(num_blocks)
    scheduler.waiting = list(requests)
    history = []
    for step in range(1, steps + 1):
        scheduler.waiting += [request for at, request in late if at == step]
        if scheduler.waiting or scheduler.running or any(at > step for at, _ in late):
            history.append(scheduler.step())
    return scheduler, history


def test_its_showpiece_takes_five_steps():
    scheduler, history = serve(
        20, NaiveRequest("A", 10, 2), NaiveRequest("B", 12, 5), late=[(3, NaiveRequest("C", 8, 3))]
    )
    assert history == [["A", "B"], ["A", "B"], ["B", "C"], ["B", "C"], ["B", "C"]]
    assert len(scheduler.free) == 20 and scheduler.warnings == []


def test_with_an_empty_pool_it_warns_and_counts_the_token_all_the_same():
    a, b = NaiveRequest("A", 10, 10), NaiveRequest("B", 12, 10)
    scheduler, history = serve(2, a, b)
    assert a.num_tokens == 20 and len(a.blocks) * 16 == 16 and len(history) == 10
    assert len(scheduler.warnings) == (20 - 16) + (22 - 16)
    assert scheduler.warnings[0] == "no block left for token 17 of B"


def test_a_request_larger_than_the_pool_blocks_the_queue_for_ever():
    scheduler, history = serve(2, NaiveRequest("big", 40, 1), NaiveRequest("C", 8, 3), steps=200)
    assert history == [[]] * 200 and len(scheduler.waiting) == 2


@pytest.mark.parametrize("prompt, output", [(16, 1), (15, 1), (1, 40)])
def test_every_block_comes_back_in_the_end(prompt, output):
    scheduler, _ = serve(8, NaiveRequest("A", prompt, output))
    assert scheduler.free == {f"b{i}" for i in range(8)} and not scheduler.running
