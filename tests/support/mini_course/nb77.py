"""Exercises of a notebook that exists only in the tests: a counter, a sum, and a leaky pool."""

from labcore.course.learner.exercise import BugHunt, Exercise, expect, expect_attributes, expect_equal, expect_raises
from labcore.kvcache.blocks import BlockPool


class LeakyPool(BlockPool):
    """Gives back only the first of the blocks."""

    def free(self, blocks):
        super().free(blocks[:1])


def check_allocate(pool_class):
    expect_attributes(pool_class, "allocate")
    pool = pool_class(4, 4)
    expect_equal(len(pool.allocate(3)), 3, "allocate(3) was asked of a pool of 4")
    expect_equal(pool.num_free, 1, "3 of 4 blocks were taken", hint=2)
    expect_raises(RuntimeError, lambda: pool.allocate(2), "allocate(2) was asked with one block left", hint=2)


def check_total(total):
    expect_equal(total, 6, "the three lengths were added")


def check_leak(pool_class):
    pool = pool_class(4, 4)
    pool.free(pool.allocate(3))
    expect(
        pool.num_free == 4, f"3 blocks were given back, {4 - pool.num_free} are still taken", "every block to be free"
    )


TOTAL = 6

EXERCISES = (
    Exercise(
        "77.allocate",
        title="allocate",
        minutes=8,
        difficulty=1,
        spec="allocate(n) takes n blocks, all or nothing.",
        check=check_allocate,
        passed="takes n blocks, all or nothing",
        hints=("Where do free blocks wait?", "Count them before you take the first."),
        reference="kvcache.blocks.BlockPool",
        methods=("allocate",),
    ),
    Exercise(
        "77.total",
        title="a sum",
        minutes=2,
        difficulty=1,
        spec="The sum of the lengths.",
        check=check_total,
        passed="6 tokens in all",
        hints=("Three numbers.", "One plus two is three."),
        reference="course.exercises.nb77.TOTAL",
    ),
    BugHunt(
        "77.leak",
        title="the leak",
        minutes=10,
        difficulty=2,
        spec="After free, every block is free.",
        check=check_leak,
        passed="gives back all that it took",
        hints=("Count after each step.", "Look at the slice."),
        reference="kvcache.blocks.BlockPool",
        planted="course.exercises.nb77.LeakyPool",
        seen_in="vllm-project/vllm#1584",
    ),
)
