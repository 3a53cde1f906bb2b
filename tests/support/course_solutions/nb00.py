"""Right and wrong answers to the exercise of notebook 00."""

import math


def rounded_up(num_tokens, block_size):
    return math.ceil(num_tokens / block_size)


def with_remainder(num_tokens, block_size):
    full, rest = divmod(num_tokens, block_size)
    return full + (rest > 0)


def rounded_down(num_tokens, block_size):
    return num_tokens // block_size


def always_one_more(num_tokens, block_size):
    return num_tokens // block_size + 1


def a_fraction(num_tokens, block_size):
    return num_tokens / block_size


def a_float(num_tokens, block_size):
    return float(math.ceil(num_tokens / block_size))


RIGHT = {"00.blocks_for": [rounded_up, with_remainder]}
WRONG = {
    "00.blocks_for": [
        (rounded_down, "too few for all tokens"),
        (always_one_more, "one block too many"),
        (a_fraction, "no whole number"),
        (a_float, "a float"),
    ]
}
