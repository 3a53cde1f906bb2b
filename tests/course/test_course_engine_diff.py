"""The hot-swap test: a part that does what ours does is told so; any other, at the first step where it shows."""

from __future__ import annotations

import pytest
import torch

from labcore.attention.torch_backend import TorchAttention
from labcore.course.learner import engine_diff
from labcore.course.learner.engine_diff import compare, find_seam, find_seams, swap_test
from labcore.course.learner.stand_in import stand_in
from labcore.course.learner.whose_code import counted, labcores_methods, learners_methods
from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.models import from_model
from labcore.scheduler.policy import PriorityWithAging
from labcore.scheduler.scheduler import Scheduler


@pytest.fixture(scope="module")
def loaded():
    from tiny_models import tiny

    return from_model(tiny("llama"))


class OtherOrder(BlockPool):
    """Hands blocks out last in, first out: other blocks than ours, and rightly so."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._stack = list(range(num_blocks))
        self._owners = [0] * num_blocks

    @property
    def num_free(self):
        return len(self._stack)

    def allocate(self, n):
        taken = [self._stack.pop() for _ in range(n)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def free(self, blocks):
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._stack.append(block)

    def share(self, blocks):
        for block in blocks:
            self._owners[block] += 1

    def incref(self, blocks):
        for block in blocks:
            if self._owners[block] == 0:
                self._stack.remove(block)
            self._owners[block] += 1

    def refcount(self, block):
        return self._owners[block]

    def is_writable(self, block):
        return self._owners[block] == 1

    def free_blocks(self):
        return iter(self._stack)


class LosesOneOfFour(BlockPool):
    def free(self, blocks):
        super().free(blocks[:3])


class LosesOneOfTen(BlockPool):
    def free(self, blocks):
        super().free(blocks[:9])


class GivesTheSameTwice(BlockPool):
    def allocate(self, n):
        taken = super().allocate(n)
        return [taken[0]] * n if n else []


class RaisesLate(BlockPool):
    def free(self, blocks):
        return blocks[99]


class CannotBeMade(BlockPool):
    def __init__(self, num_blocks, block_size):
        raise NotImplementedError("your turn: 02.pool")


class NeverEnds(BlockPool):
    def allocate(self, n):
        while True:
            pass


class TwoAtATime(Scheduler):
    """Plans otherwise, and loses nothing by it but time."""

    def __init__(self, kv, **settings):
        super().__init__(kv, **settings | {"max_num_seqs": 2})

    def schedule(self, budget=None):
        return super().schedule(budget)


class ForgetsToWeigh(TorchAttention):
    def attend(self, cache, layer, q, metadata, **options):
        return torch.zeros_like(q)


def test_our_own_part_is_the_same_as_ours_and_the_pool_runs_dry_on_the_way(loaded):
    verdict = compare({"block_pool": BlockPool}, loaded)
    assert verdict.same
    assert "15 texts, 208 tokens, all identical; free blocks and table lengths agree throughout" in verdict.what
    preemptions = int(verdict.what.split(" preemptions")[0].split()[-1])
    assert preemptions > 0


def test_which_blocks_a_pool_hands_out_is_its_own_business(loaded):
    assert compare({"block_pool": OtherOrder}, loaded).same


@pytest.mark.parametrize(
    ("seam", "part", "words"),
    [
        ("block_pool", LosesOneOfFour, "all well for 6 steps, then the engine's invariants are violated: block 0: 1 tables"),
        ("block_pool", LosesOneOfTen, "they part at step"),
        ("block_pool", LosesOneOfTen, "Then the engine's invariants are violated: block"),
        ("block_pool", GivesTheSameTwice, "the engine's invariants are violated: block 0: "),
        (
            "block_pool",
            RaisesLate,
            "then it raised IndexError: list index out of range in free, at `return blocks[99]`.",
        ),
        ("block_pool", CannotBeMade, "all well for 0 steps, then it raised NotImplementedError: your turn: 02.pool"),
        ("block_pool", NeverEnds, "then it was still running after 1 s, in allocate"),
        ("block_pool", 7, "all well for 0 steps, then it raised"),
        ("attention_backend", ForgetsToWeigh, "they part at step 1: token 1 of r0 is "),
    ],
)
def test_a_part_that_differs_is_told_where_and_how(loaded, seam, part, words):
    verdict = compare({seam: part}, loaded, timeout=1 if part is NeverEnds else 60)
    assert not verdict.same
    assert words in verdict.what


def test_a_scheduler_may_plan_otherwise_as_long_as_nobody_says_anything_else(loaded):
    verdict = compare({"scheduler": TwoAtATime}, loaded)
    assert verdict.same
    assert "208 tokens, all identical; it plans otherwise" in verdict.what


def test_the_seam_is_found_by_what_the_part_is_or_by_its_name():
    unrelated = type("Scheduler", (), {})
    renamed = type("MyScheduler", (unrelated,), {})
    assert find_seam(OtherOrder) == "block_pool"
    assert find_seam(OtherOrder(4, 4)) == "block_pool"
    assert find_seam(TwoAtATime) == "scheduler"
    assert find_seam(renamed) == "scheduler"
    assert find_seam(TorchAttention) == "attention_backend"
    assert find_seam(BlockTable) == "block_table" and find_seam(PriorityWithAging) == "policy"
    assert find_seams((OtherOrder, BlockTable), {"chunking": 3}) == {
        "block_pool": OtherOrder, "block_table": BlockTable, "chunking": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("part", "parts", "words"),
    [
        ((), {}, "give a part"),
        ((OtherOrder,), {"block_pool": OtherOrder}, "two parts are given for block_pool"),
        ((BlockPool,), {}, "nothing of yours is in BlockPool: it is labcore's own."),
        ((OtherOrder, Scheduler), {}, "nothing of yours is in Scheduler: it is labcore's own."),
        ((), {"pool": BlockPool}, "there is no seam 'pool'; there are block_pool, block_table, kv_cache_manager, scheduler"),
        ((), {"block_pool": type("Half", (), {"allocate": print})}, "Half has no free, share, incref, refcount, is_writable, "),
        ((int,), {}, "int could be any part: say which, swap_test(block_pool=int)."),
    ],
)
def test_swap_test_says_in_one_line_what_it_cannot_run(capsys, part, parts, words):
    swap_test(*part, **parts)
    assert words in capsys.readouterr().out


def test_the_verdict_is_printed_and_fits_the_page(loaded, capsys):
    swap_test(LosesOneOfFour, model=loaded)
    said = capsys.readouterr().out
    assert said.startswith("swap_test block_pool=LosesOneOfFour   not the same — all well for 6 steps, then")
    assert max(map(len, said.splitlines())) <= 120


class WrittenByALearner(BlockTable):
    def append(self, n):
        return super().append(n)

    def never_asked_for(self):
        return 1


def test_swap_test_tells_which_of_the_learners_methods_ran_and_what_is_labcores(loaded):
    verdict = compare({"block_pool": OtherOrder, "block_table": WrittenByALearner}, loaded)
    pool, table = verdict.whose
    assert verdict.same and pool.startswith("calls of your OtherOrder: ") and ", share " in pool
    ran, idle, labcores = table.split(" · ")
    assert ran.startswith("calls of your WrittenByALearner: append ")
    assert idle == "never called: never_asked_for"
    assert labcores.startswith("labcore's: ") and "fork" in labcores and "append" not in labcores
    assert str(verdict).startswith("swap_test block_pool=OtherOrder, block_table=WrittenByALearner\n            same — ")


def test_swap_test_counts_calls_as_they_are(loaded):
    counts = []

    class Counts(BlockTable):
        def copy_on_write(self):
            counts.append(1)
            return super().copy_on_write()

    verdict = compare({"block_table": Counts}, loaded)
    assert verdict.whose[0].startswith(f"calls of your Counts: copy_on_write {len(counts)} ")


def test_swap_test_reaches_aging_and_victims_of_a_scheduler_and_its_policy(loaded):
    class MyPolicy(PriorityWithAging):
        def sort_key(self, request):
            return super().sort_key(request)

        def can_preempt(self, waiting, running):
            return super().can_preempt(waiting, running)

    class MyScheduler(Scheduler):
        def _victims(self, urgent, missing):
            return super()._victims(urgent, missing)

        def _schedule_waiting(self, plan, budget, keep_watermark=True):
            super()._schedule_waiting(plan, budget, keep_watermark)

    verdict = compare({"scheduler": MyScheduler, "policy": MyPolicy}, loaded)
    assert verdict.same and not any("never called" in said for said in verdict.whose), verdict.whose


def test_calls_of_a_generator_are_not_counted_again_when_it_is_resumed():
    def numbers():
        yield 1
        yield 2

    def plain():
        return list(numbers()) + list(numbers())

    with counted({"numbers": numbers.__code__, "plain": plain.__code__}) as calls:
        assert plain() == [1, 2, 1, 2]
    assert calls == {"numbers": 2, "plain": 1}


def test_borrowed_methods_are_not_counted_as_the_learners():
    mine = type("Mine", (BlockTable,), {"append": lambda self, n: BlockTable.append(self, n), "__module__": "notebook"})
    patched = stand_in(mine, {"copy_on_write": BlockTable.copy_on_write})
    stubbed = stand_in(type("Stub", (mine,), {"free": lambda self: 1, "__module__": "notebook"}), {"free": BlockTable.free})
    assert "free" not in learners_methods(stubbed) and "free" in labcores_methods(stubbed, BlockTable)
    assert list(learners_methods(patched)) == ["append"] and "copy_on_write" in labcores_methods(patched, BlockTable)


def test_swap_test_leaves_the_random_numbers_as_they_were(loaded, capsys):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    swap_test(OtherOrder, model=loaded)
    assert torch.equal(torch.rand(1), expected)


def test_an_llm_lends_its_model(loaded):
    from labcore import LLM

    assert engine_diff.load_once(LLM(loaded, num_blocks=8)) is loaded


@pytest.mark.slow
def test_the_real_model_speaks_the_same_from_another_pool(smollm2, capsys):
    swap_test(OtherOrder, model=smollm2)
    assert capsys.readouterr().out.startswith("swap_test block_pool=OtherOrder   same — 15 texts, 208 tokens")
