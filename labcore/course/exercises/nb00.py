"""The exercise of notebook 00: one to see how exercises work."""

from __future__ import annotations

from typing import Any

from labcore.course.learner.exercise import Exercise, expect, expect_equal


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks of `block_size` tokens that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def check_blocks_for(blocks_for: Any) -> None:
    for num_tokens, block_size, expected in ((6, 4, 2), (8, 4, 2), (9, 4, 3), (1, 16, 1), (0, 4, 0), (5, 1, 5)):
        got = blocks_for(num_tokens, block_size)
        said = f"{num_tokens} tokens in blocks of {block_size}"
        expect(got != num_tokens / block_size or got == expected, f"{said}: got {got}, which is no whole number of blocks",
               f"{expected}", hint=1)  # fmt: skip
        expect(got != expected + 1, f"{said}: got {got}, one block too many", f"{expected}", hint=2)
        expect(got != expected - 1, f"{said}: got {got}, too few for all tokens", f"{expected}", hint=1)
        expect_equal(got, expected, said)
        expect(isinstance(got, int), f"{said}: got {got!r}, a {type(got).__name__}", f"{expected}, an int", hint=3)


EXERCISES = [
    Exercise(
        id="00.blocks_for",
        title="blocks for a request",
        minutes=3,
        difficulty=1,
        spec="`blocks_for(num_tokens, block_size)` returns the number of blocks, a whole number. No tokens need no block.",
        passed="the last block may be partly empty, and is counted all the same.",
        reference="course.exercises.nb00.blocks_for",
        check=check_blocks_for,
        hints=(
            "A last block that is only partly filled is still a block: divide, and round up.",
            "`n // size + 1` is right unless the tokens fill the last block to the brim. What then?",
            "Python's `//` rounds down, also below zero. Two minus signs turn that into rounding up, and stay whole numbers.",
        ),
    )
]
