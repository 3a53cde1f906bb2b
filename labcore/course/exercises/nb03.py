"""Exercises of notebook 03, the kernels: rescale, rows of a group, the last block, joining splits, and a bug hunt."""

from __future__ import annotations

from typing import Any

from labcore.course.learner.exercise import BugHunt, Exercise, expect, expect_equal, show

SPLITS = 4


def check_rescale(online_softmax: Any) -> None:
    import torch

    from labcore.course.exercises.nb03_kernels import fold

    low = torch.tensor([[2.0, 1.0]] * 16)
    high = torch.tensor([[5.0, 3.0]] * 16)
    first = "a first tile of scores 2 and 1 came"
    weights, rescale, peak, total = fold(online_softmax, torch.stack([low, high]))
    expect_close(peak[0, 0], 2.0, f"{first}; the peak")
    expect_close(weights[0, 0], [1.0, 0.5], f"{first}; its weights, 2 to the power of score - peak")
    expect_close(total[0, 0], 1.5, f"{first}; the total of its weights")
    then = "the scores 2 and 1 came, and then a tile of 5 and 3"
    expect_close(peak[1, 0], 5.0, f"{then}; the peak", hint=2)
    expect_close(weights[1, 0], [1.0, 0.25], f"{then}; the weights of the second tile", hint=2)
    expect_close(rescale[1, 0], 0.125, f"{then}; rescale, for what was measured from the peak 2", hint=2)
    expect_close(total[1, 0], 1.4375, f"{then}; the total of all four weights, measured from the peak 5", hint=3)
    then = "the scores 5 and 3 came, and then a tile of 2 and 1"
    weights, rescale, peak, total = fold(online_softmax, torch.stack([high, low]))
    expect_close(peak[1, 0], 5.0, f"{then}; the peak", hint=2)
    expect_close(weights[1, 0], [0.125, 0.0625], f"{then}; the weights of the second tile", hint=2)
    expect_close(rescale[1, 0], 1.0, f"{then}; rescale: the peak has not moved", hint=2)
    expect_close(total[1, 0], 1.4375, f"{then}; the total of all four weights", hint=3)
    check_rescale_many_rows(online_softmax)
    check_rescale_unseen(online_softmax)


def check_rescale_many_rows(online_softmax: Any) -> None:
    import torch

    from labcore.course.exercises.nb03_kernels import fold

    scores = 20 * torch.randn(5, 16, 8, generator=torch.Generator().manual_seed(3)) + 500
    _, _, peak, total = fold(online_softmax, scores)
    said = "five tiles of scores around 500 came, 16 rows each"
    expect_close(peak[-1], scores.amax((0, 2)), f"{said}; the peak of each row")
    expected = torch.exp2(scores.double() - scores.amax((0, 2)).double()[None, :, None]).sum((0, 2))
    expect_close(total[-1], expected, f"{said}; the total of each row", hint=3)


def check_rescale_unseen(online_softmax: Any) -> None:
    """A row whose first keys are all masked, as in a causal tile or under a window."""
    import torch

    from labcore.course.exercises.nb03_kernels import fold

    masked = torch.full((16, 2), float("-inf"))
    weights, rescale, _, total = fold(online_softmax, torch.stack([masked, torch.tensor([[3.0, 2.0]] * 16)]))
    said = "a row saw nothing in its first tile (all scores -inf)"
    expect(not weights[0].isnan().any(), f"{said}; its weights are NaN", "0: 2 to the power of -inf", hint=4)
    expect_close(weights[0, 0], [0.0, 0.0], f"{said}; its weights", hint=4)
    expect_close(total[0, 0], 0.0, f"{said}; its total", hint=4)
    said += ", and 3 and 2 in the second"
    expect(not rescale[1].isnan().any(), f"{said}; rescale is NaN", "0, or any number: there is nothing to rescale", 4)
    expect_close(total[1, 0], 1.5, f"{said}; its total", hint=4)


def check_group_rows(group_rows: Any) -> None:
    from labcore.course.exercises.nb03_kernels import rows_of

    for kv_head, group, num_rows in ((0, 4, 16), (1, 4, 16), (2, 3, 16), (1, 7, 16), (0, 1, 16), (1, 20, 32)):
        heads, valid = rows_of(group_rows, kv_head, group, num_rows)
        said = f"KV head {kv_head}, {group} query heads to each KV head, a tile of {num_rows} rows"
        expected = list(range(kv_head * group, kv_head * group + group))
        expect_equal(heads[:group], expected, f"{said}; the query heads of its first {group} rows", hint=1)
        want = [1] * group + [0] * (num_rows - group)
        expect_equal(valid, want, f"{said}; which rows are heads (1) and which are padding (0)", hint=2)


def check_last_block(paged_decode: Any) -> None:
    from labcore.course.exercises.nb03_kernels import decoded, expected_decode, used_pool

    for lens, splits in (([16, 17, 1], 1), ([15, 3], 1), ([40], 2)):
        problem = used_pool(lens)
        expected, out = expected_decode(problem, 0.25), decoded(paged_decode, problem, 0.25, splits)
        for i, n in enumerate(lens):
            said = f"{n} tokens, blocks of 16, tiles of 16 keys" + (", two splits" if splits > 1 else "")
            broken = f"{said}; the result is not finite"
            expect(bool(out[i].isfinite().all()), broken, "numbers: a slot beyond the last token is never read", hint=1)
            expect_close(out[i], expected[i], f"{said}; the first number of the result", hint=2)


def check_reduce(reduce_splits: Any) -> None:
    import torch

    from labcore.course.exercises.nb03_kernels import joined

    parts = torch.zeros(1, 1, 2, 16)
    parts[0, 0, 0], parts[0, 0, 1] = 4.0, 8.0
    said = "two splits, one with the result 4 and one with 8"
    out = joined(reduce_splits, parts, torch.tensor([[[3.0, 3.0]]]))
    expect_close(out[0, 0], 6.0, f"{said}, log2 of the totals 3 and 3: equal shares", hint=1)
    out = joined(reduce_splits, parts, torch.tensor([[[1.0, 3.0]]]))
    expect_close(out[0, 0], 7.2, f"{said}, log2 of the totals 1 and 3, which is totals of 2 and 8", hint=1)
    out = joined(reduce_splits, parts, torch.tensor([[[501.0, 503.0]]]))
    expect(bool(out.isfinite().all()), f"{said}, log2 of the totals 501 and 503; it is not finite", "7.2 again", hint=2)
    expect_close(out[0, 0], 7.2, f"{said}, log2 of the totals 501 and 503", hint=2)
    parts[0, 0, 1] = float("nan")
    out = joined(reduce_splits, parts, torch.tensor([[[3.0, float("-inf")]]]))
    expect_close(out[0, 0], 4.0, "the second of two splits had no keys: its log2 total is -inf", hint=3)
    out = joined(reduce_splits, parts, torch.full((1, 1, 2), float("-inf")))
    expect_close(out[0, 0], 0.0, "neither split had keys, as in the padding of a captured batch; the result", hint=3)
    check_reduce_many(reduce_splits)


def check_reduce_many(reduce_splits: Any) -> None:
    import torch

    from labcore.course.exercises.nb03_kernels import joined

    gen = torch.Generator().manual_seed(3)
    parts = torch.randn(3, 2, SPLITS, 24, generator=gen)
    logs = 10 * torch.randn(3, 2, SPLITS, generator=gen)
    shares = torch.exp2(logs.double() - logs.double().amax(-1, keepdim=True))
    expected = (shares[..., None] * parts).sum(2) / shares.sum(-1)[..., None]
    said = f"3 sequences of 2 heads, {SPLITS} splits each"
    expect_close(joined(reduce_splits, parts, logs), expected, said, hint=1)


def check_slots(kernel: Any) -> None:
    from labcore.course.exercises.nb03_kernels import expected_decode, one_query, used_pool

    for lens in ([16, 32, 48], [1, 5, 15], [17, 33, 40]):
        problem = used_pool(lens, num_query_heads=1)
        expected, out = expected_decode(problem, 1.0)[:, 0], one_query(kernel, problem)
        for i, n in enumerate(lens):
            said = f"{n} tokens in a used pool, blocks of 16"
            expect(bool(out[i].isfinite().all()), f"{said}; the result is not finite", "numbers", hint=1)
            expect_close(out[i], expected[i], f"{said}; the result", hint=3)


def expect_close(got: Any, expected: Any, what: str, hint: int = 1) -> None:
    """Go on if all numbers are within a hundred-thousandth of the expected ones; else show the first that isn't."""
    import torch

    got = torch.as_tensor(got).double()
    expected = torch.as_tensor(expected).double().expand(got.shape)
    wrong = ~torch.isclose(got, expected, rtol=1e-5, atol=1e-5)
    if wrong.any():
        came, want = got[wrong][0].item(), expected[wrong][0].item()
        expect(False, f"{what} is {show(round(came, 4))}", f"{show(round(want, 4))}", hint)


EXERCISES = (
    Exercise(
        id="03.rescale",
        title="the peak moves",
        minutes=15,
        difficulty=2,
        spec="online_softmax(scores, m_i, l_i) takes one more tile of scores, in units of log2, and returns the "
        "tile's weights, the factor for everything that was summed before, and the new peak and total of each row. A "
        "row that has seen nothing yet has the peak -inf; neither its weights nor its factor may be NaN.",
        check=check_rescale,
        passed="the peak moves, the past is rescaled, and a row that has seen nothing stays at 0",
        hints=(
            "The new peak is the larger one of the old peak and the largest score of the tile, row by row: axis 1.",
            "Weights are measured from the new peak. What was measured from the old one is too large by 2 to the power "
            "of (new - old): so what is the factor?",
            "The total is a sum of weights like any other, so its past has to be rescaled, too, before this tile's "
            "weights join it.",
            "-inf minus -inf is NaN. Measure such a row from 0 instead: tl.where can choose.",
        ),
        reference="attention.kernels.online_softmax.online_softmax",
    ),
    Exercise(
        id="03.group_rows",
        title="who shares a KV head",
        minutes=8,
        difficulty=1,
        spec="group_rows(kv_head, GROUP, ROWS) returns two rows of length ROWS: the query heads that read this KV "
        "head, one a row, and whether a row is one of them. Query head h reads KV head h // GROUP; ROWS >= GROUP.",
        check=check_group_rows,
        passed="the heads of a group stand side by side, and padding is known as padding",
        hints=(
            "Which query heads h have h // GROUP == kv_head? They are neighbours. Where do they begin?",
            "A row counts if its number is below GROUP, whichever KV head it is.",
        ),
        reference="attention.kernels.decode.group_rows",
    ),
    Exercise(
        id="03.last_block",
        title="mask of the last block",
        minutes=8,
        difficulty=1,
        spec="present, [TILE]: which of a tile's keys are tokens of the sequence. What lies beyond its last token is "
        "neither read nor counted.",
        check=check_last_block,
        passed="1, 3, 15, 16 and 17 tokens in a used pool, with and without splits: nobody else's slot is read",
        hints=(
            "A tile has TILE keys, a sequence rarely a multiple of them. Which of `keys` are tokens at all?",
            "Count from 0: a sequence of 16 tokens has the keys 0 to 15.",
            "The loop knows where this program's keys come to an end.",
        ),
        reference="attention.kernels.decode.paged_decode",
    ),
    Exercise(
        id="03.join_splits",
        title="put the splits together",
        minutes=15,
        difficulty=3,
        spec="From log_total, [SPLITS], log2 of each split's sum of exponentials, and parts, [SPLITS, DIMS], each "
        "split's own result: result, [DIMS], as if one program had seen all keys. A split whose log_total is -inf had "
        "no keys; if none had any, the result is 0.",
        check=check_reduce,
        passed="every split counts by its total, whatever their size, and empty ones don't",
        hints=(
            "Each part is an average over its own keys. The average over all keys is the average of the parts, each "
            "with the weight of its total.",
            "2 to the power of 500 is no float32. Only ratios matter: measure from the largest log_total.",
            "-inf minus -inf is NaN, and 0 / 0 too. `parts` holds 0 for a split without keys.",
        ),
        reference="attention.kernels.decode.reduce_splits",
    ),
    BugHunt(
        id="03.used_slots",
        title="bug hunt: fine in the morning",
        minutes=15,
        difficulty=2,
        spec="A kernel with the arguments of `colleagues_decode`: attention of one query over n tokens in any blocks, "
        "whatever the slots that nobody owns hold.",
        check=check_slots,
        passed="1 to 48 tokens in a pool full of NaN, and not one gets through",
        hints=(
            "When is it right, and when not? 16 and 32 tokens are fine. Which keys of a tile make the difference?",
            "The weight of a slot that isn't alive is 0. What is 0 times NaN?",
            "It is not enough to count a slot as nothing: it must not be read. K is careful there. V?",
        ),
        reference="course.exercises.nb03_planted.mended_decode",
        planted="course.exercises.nb03_planted.colleagues_decode",
        seen_in="Dao-AILab/flash-attention#1745",
    ),
)
