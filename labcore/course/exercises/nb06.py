"""Exercises of notebook 06, chunked prefill: cut, share a step, sample, find the budget, and a bug hunt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from labcore.course.exercises.nb06_planted import EagerStream, Event
from labcore.course.learner.exercise import BugHunt, Exercise, expect, expect_attributes, expect_equal, show
from labcore.course.learner.text_engine import TextEngine, spelled
from labcore.kvcache.prefix import NoPrefixCache
from labcore.request import Request
from labcore.sampling_params import SamplingParams
from labcore.scheduler.chunking import WholePrompts


def pieces(num_tokens: int, room: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of each piece that a prompt is computed in, given what the others leave of each step."""
    cut, start = [], 0
    for left in room:
        stop = min(start + left, num_tokens)
        if stop > start:
            cut.append((start, stop))
        start = stop
    return cut


def rows_to_sample(batch: Sequence[tuple[Request, int]]) -> list[tuple[str, int]]:
    """(request id, row of the flattened batch) for each request that has caught up when the step is over."""
    rows, end = [], 0
    for request, n in batch:
        end += n
        if n == request.num_uncomputed_tokens:
            rows.append((request.request_id, end - 1))
    return rows


class MendedStream(EagerStream):
    """`EagerStream` as notebook 06 mends it: it sends what has been said since it last sent something."""

    def after_step(self, plan: Any, requests: Any) -> list[Event]:
        events = []
        for name in plan.num_scheduled_tokens:
            news = requests[name].output_token_ids[self.num_sent[name] :]
            self.num_sent[name] += len(news)
            events += [(name, token, self.spell([token])) for token in news]
        return events


def check_pieces(pieces: Any) -> None:
    for num_tokens, room, expected, hint in (
        (10, [16], [(0, 10)], 1),
        (10, [4, 4, 4], [(0, 4), (4, 8), (8, 10)], 1),
        (10, [4, 0, 7, 9], [(0, 4), (4, 10)], 2),
        (10, [3, 3], [(0, 3), (3, 6)], 2),
        (5, [], [], 2),
        (8, [4, 4, 4], [(0, 4), (4, 8)], 2),
        (9, [1, 7, 5], [(0, 1), (1, 8), (8, 9)], 3),
    ):
        said = f"a prompt of {num_tokens} tokens, and room for {show(room)} in the steps: its pieces"
        got = pieces(num_tokens, list(room))
        expect(isinstance(got, list), f"{said}; pieces gave {show(got)}", "a list of pairs")
        expect_equal([tuple(piece) for piece in got], expected, said, hint)
    dice = random.Random(6)
    for _ in range(60):
        num_tokens, room = dice.randrange(1, 60), [dice.randrange(12) for _ in range(dice.randrange(12))]
        said = f"a prompt of {num_tokens} tokens, and room for {show(room)} in the steps: its pieces"
        expect_equal([tuple(piece) for piece in pieces(num_tokens, room)], OURS["pieces"](num_tokens, room), said, 3)


def check_chunks(ChunkedPrefill: Any) -> None:
    expect_attributes(ChunkedPrefill, "begin_step", "num_tokens")
    policy = ChunkedPrefill()
    for uncomputed, left, expected in ((100, 200, 100), (100, 100, 100), (100, 30, 30), (1, 5, 1), (1, 0, 0), (7, 0, 0)):
        said = f"{uncomputed} tokens of a request are uncomputed, and a step of 200 has {left} left"
        policy.begin_step()
        expect_takes(policy, asking(uncomputed), left, expected, said, hint=1)
    policy.begin_step()
    expect_takes(policy, asking(100, computed=60), 30, 30, "60 of 100 tokens are computed, a step has 30 left", hint=1)
    expect_takes(policy, asking(100, computed=90), 30, 10, "90 of 100 tokens are computed, a step has 30 left", hint=1)
    check_threshold(ChunkedPrefill)
    check_partial(ChunkedPrefill)
    check_at_the_desk(ChunkedPrefill)


def check_threshold(ChunkedPrefill: Any) -> None:
    policy = ChunkedPrefill(4, 16)
    for uncomputed, left, expected in ((100, 64, 16), (16, 64, 16), (10, 64, 10), (100, 8, 8), (10, 4, 4)):
        said = f"long_prefill_threshold is 16; {uncomputed} tokens are uncomputed, and a step has {left} left"
        policy.begin_step()
        expect_takes(policy, asking(uncomputed), left, expected, said, hint=2)


def check_partial(ChunkedPrefill: Any) -> None:
    policy = ChunkedPrefill(1, 16)
    said = "max_partial_prefills is 1, the threshold 16"
    for time in ("a step", "the next step, after begin_step()"):
        policy.begin_step()
        expect_takes(policy, asking(10), 64, 10, f"{said}; {time} begins with a prompt of 10 tokens", hint=2)
        expect_takes(policy, asking(1), 54, 1, f"{said}; {time} goes on with a token of somebody who decodes", hint=2)
        expect_takes(policy, asking(100), 0, 0, f"{said}; in {time}, a long prompt finds no room at all", hint=3)
        expect_takes(policy, asking(100), 53, 16, f"{said}; {time} left no prompt unfinished so far; a long one", hint=3)
        expect_takes(policy, asking(90), 37, 0, f"{said}; {time} left one prompt unfinished already; a second one", hint=3)
        expect_takes(policy, asking(8), 37, 8, f"{said}; {time} left one unfinished; a prompt of 8, with room for it", hint=3)
    policy = ChunkedPrefill(2, 0)
    policy.begin_step()
    taken = [policy.num_tokens(asking(50), left, 60) for left in (20, 20, 20)]
    expect_equal(taken, [20, 20, 0], "max_partial_prefills is 2; three prompts of 50 found 20 left each", hint=3)


def check_at_the_desk(ChunkedPrefill: Any) -> None:
    """The real scheduler: nobody starves, no budget is exceeded, and everybody says what they say in one piece."""
    dice = random.Random(1)
    texts = [("".join(dice.choice("abc") for _ in range(dice.randrange(1, 40)))) for _ in range(12)]
    whole = serve(texts, WholePrompts(8), budget=1000)[0]
    for budget in (1, 3, 8, 21):
        for policy in (ChunkedPrefill(), ChunkedPrefill(2, 5)):
            said, largest, foreign = serve(texts, policy, budget)
            run = f"12 texts were served with a budget of {budget}"
            expect(said is not None, f"{run}; after 2,000 steps somebody was still waiting", "everybody to be served", 1)
            expect(largest <= budget, f"{run}; a step computed {largest} tokens", f"at most {budget}", 1)
            expect(not foreign, f"{run}; {foreign[0] if foreign else ''}", "everybody to read their own", 1)
            expect_equal(said, whole, f"{run}: what they said, and what they say when prompts are whole", 1)


def expect_takes(policy: Any, request: Request, left: int, expected: int, said: str, hint: int) -> None:
    expect_equal(policy.num_tokens(request, left, 200), expected, f"{said}: tokens to compute now", hint)


def serve(texts: Sequence[str], policy: Any, budget: int) -> tuple[dict[str, str] | None, int, list[str]]:
    """What each text was followed by (None if somebody was left over), the largest step, and what was read wrongly."""
    desk = TextEngine(NoPrefixCache, num_blocks=120, budget=budget, chunking=policy)
    for number, text in enumerate(texts):
        desk.submit(f"r{number}", text, output=3)
    largest = 0
    for _ in range(2000):
        if not desk.scheduler.has_unfinished_requests():
            return desk.run(), largest, desk.foreign_reads
        largest = max(largest, desk.step().num_tokens)
    return None, largest, desk.foreign_reads


def asking(tokens: int, computed: int = 0, said: int = 0, name: str = "r") -> Request:
    """A request with so many tokens of prompt, of which some are computed, and some of output."""
    request = Request(name, [0] * tokens, SamplingParams(max_tokens=99), arrival=0, max_tokens=99, seed=0)
    request.output_token_ids = [1] * said
    request.num_computed_tokens = computed
    return request


def check_rows(rows_to_sample: Any) -> None:
    ana, bo = asking(7, computed=9, said=3, name="ana"), asking(4, computed=4, said=1, name="bo")
    di = asking(20, name="di")
    for batch, expected, what, hint in (
        ([(ana, 1)], [("ana", 0)], "ana decodes", 1),
        ([(ana, 1), (bo, 1)], [("ana", 0), ("bo", 1)], "ana and bo decode", 1),
        ([(di, 20)], [("di", 19)], "di's prompt of 20 is computed whole", 1),
        ([(di, 6)], [], "the first 6 of di's 20 tokens are computed", 2),
        ([(ana, 1), (di, 6), (bo, 1)], [("ana", 0), ("bo", 7)], "ana and bo decode, and between them 6 of di's 20", 2),
        ([(asking(20, 15, name="di"), 5)], [("di", 4)], "15 of di's 20 tokens are there, and the other 5 are computed", 2),
        ([(bo, 1), (asking(20, 12, name="di"), 8)], [("bo", 0), ("di", 8)], "bo decodes, and di's last 8 of 20", 2),
        ([(asking(20, 15, name="di"), 4)], [], "of di's 20 tokens, 15 are there, and 4 more are computed", 2),
        ([(asking(6, 0, said=5, name="cy"), 8)], [], "cy was pushed out with a prompt of 6 and 5 words said; the first 8 "
         "of these 11 are computed again", 3),
        ([(asking(6, 8, said=5, name="cy"), 3)], [("cy", 2)], "cy was pushed out with a prompt of 6 and 5 words said; "
         "the last 3 of these 11 are computed again", 3),
    ):  # fmt: skip
        got = rows_to_sample(list(batch))
        expect(isinstance(got, list), f"{what}; rows_to_sample gave {show(got)}", "a list of pairs")
        expect_equal([tuple(row) for row in got], expected, f"{what}: who is sampled, from which row", hint)
    dice = random.Random(2)
    for _ in range(60):
        batch = []
        for number in range(dice.randrange(1, 7)):
            prompt, said = dice.randrange(1, 30), dice.randrange(4)
            computed = dice.randrange(prompt + said)
            n = dice.choice([prompt + said - computed, dice.randrange(1, prompt + said - computed + 1)])
            batch.append((asking(prompt, computed, said, f"r{number}"), n))
        what = ", ".join(f"{r.request_id} {n} of its {r.num_uncomputed_tokens} uncomputed" for r, n in batch)
        expect_equal([tuple(row) for row in rows_to_sample(list(batch))], OURS["rows_to_sample"](batch),
                     f"a step computes {what}: who is sampled, from which row", 3)  # fmt: skip


def check_observe(AdaptiveBudget: Any) -> None:
    expect_attributes(AdaptiveBudget, "tokens", "observe")
    for found, num_tokens, seconds, expected, what, hint in (
        (64, 64, 0.79, 81, "64 tokens, all that the budget allows, took 0.79 of a target of 1 s", 1),
        (100, 100, 1.24, 80, "100 tokens took 1.24 s, the target being 1", 1),
        (64, 64, 0.1, 128, "64 tokens took a tenth of the target", 2),
        (400, 400, 9.0, 200, "400 tokens took nine times the target: somebody else was busy on the machine", 2),
        (400, 400, 0.0, 800, "400 tokens took no time at all on a coarse clock", 2),
        (20, 20, 1.9, 16, "20 tokens took 1.9 times the target, and smallest is 16", 2),
        (1500, 1500, 0.5, 2048, "1,500 tokens took half of the target, and largest is 2,048", 2),
        (400, 10, 0.3, 400, "10 tokens took 0.3 s of 1; the budget was 400, so the step was not full", 3),
        (400, 300, 0.9, 400, "300 tokens took 0.9 s of 1; the budget was 400, so the step was not full", 3),
        (400, 10, 1.0, 400, "10 tokens took exactly the target; the budget was 400, so the step was not full", 3),
        (400, 300, 1.19, 252, "300 tokens took 1.19 s, the target being 1; the budget was 400", 3),
        (400, 10, 2.0, 200, "10 tokens took twice the target; the budget was 400, and at most it halves", 2),
        (16, 26, 0.3, 32, "26 tokens took 0.3 of the target; found was 16, and at most it doubles", 2),
        (16, 26, 0.9, 28, "26 tokens, all that was allowed, took 0.9 of the target; found was 16", 3),
    ):
        budget = AdaptiveBudget(1.0)
        budget.found = found
        budget.observe(num_tokens, seconds)
        expect_equal(budget.found, expected, f"{what}: found", hint)
        expect(isinstance(budget.found, int), f"{what}; found is {show(budget.found)}", "a whole number of tokens", 1)
    for fixed, per_token in ((0.06, 0.001), (0.0, 0.0005), (0.1, 0.0002)):
        budget = AdaptiveBudget(0.2)
        for step in range(1, 81):
            took = fixed + per_token * budget.tokens(0)
            said = f"steps of {fixed} s and {per_token} s a token, target 0.2 s"
            expect(took <= 0.2 + 1e-9, f"{said}: step {step} took {took:.3f} s", "the target never to be passed", 2)
            budget.observe(budget.tokens(0), took)
        expect(took > 0.19, f"{said}: after 80 steps the budget is {budget.found}, a step takes {took:.3f} s", "0.2 s", 2)


def check_stream(EagerStream: Any) -> None:
    expect_attributes(EagerStream, "after_step")
    watch(EagerStream, TextEngine(NoPrefixCache, num_blocks=40), [(0, "bo", "the sea", 4)], "bo's prompt is computed whole", 1)
    watch(EagerStream, TextEngine(NoPrefixCache, num_blocks=40, budget=32), [(0, "di", "d" * 100, 5)],
          "a prompt of 100 letters, budget 32", 1)  # fmt: skip
    watch(EagerStream, TextEngine(NoPrefixCache, num_blocks=40, budget=32), [(0, "di", "d" * 97, 3)],
          "a prompt of 97 letters, budget 32, so that its last piece is a single letter", 2)  # fmt: skip
    watch(EagerStream, TextEngine(NoPrefixCache, num_blocks=60, budget=8), [(0, "ana", "the cat", 9), (2, "di", "d" * 40, 3)],
          "ana is talking when a prompt of 40 letters comes, budget 8", 2)  # fmt: skip
    watch(EagerStream, TextEngine(NoPrefixCache, num_blocks=7, budget=5),
          [(0, "ana", "the sea is", 9), (0, "bo", "the cat", 9)],
          "two in a pool that is too small, budget 5: one is pushed out, and comes back in pieces", 3)  # fmt: skip
    dice = random.Random(4)
    for run in range(24):
        arrivals = [(dice.randrange(12), f"r{i}", "x" * dice.randrange(1, 20), dice.randrange(1, 8)) for i in range(6)]
        desk = TextEngine(NoPrefixCache, num_blocks=dice.choice((8, 10, 40)), budget=dice.choice((3, 5, 9, 64)))
        watch(EagerStream, desk, arrivals, f"six requests by dice (run {run})", 3)


def watch(stream_of: Any, desk: TextEngine, arrivals: Sequence[tuple[int, str, str, int]], said: str, hint: int) -> None:
    """Serve requests (step, name, text, output) at a desk, and hold every event against what was said in that step."""
    stream, waiting = stream_of(spelled), sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(2000):
        while waiting and (waiting[0][0] <= step or not desk.scheduler.has_unfinished_requests()):
            _, name, text, output = waiting.pop(0)
            desk.submit(name, text, output)
        if not desk.scheduler.has_unfinished_requests():
            return
        everybody = {request.request_id: request for request in desk.submitted}
        before = {name: len(request.output_token_ids) for name, request in everybody.items()}
        plan = desk.step()
        gained = {name: everybody[name].output_token_ids[before[name] :] for name in plan.num_scheduled_tokens}
        expected = [(name, token, spelled([token])) for name, tokens in gained.items() for token in tokens]
        got = stream.after_step(plan, everybody)
        now = f"{said}: the events of step {plan.step}, which computed {show(plan.num_scheduled_tokens)}"
        expect(isinstance(got, list), f"{now}; after_step gave {show(got)}", "a list of events", hint)
        expect_equal([tuple(event) for event in got], expected, now, hint)


OURS = {"pieces": pieces, "rows_to_sample": rows_to_sample}  # by name: inside of its check, a learner's function hides ours

EXERCISES = (
    Exercise(
        id="06.pieces",
        title="a prompt in pieces",
        minutes=8,
        difficulty=1,
        spec="`pieces(num_tokens, room)` returns the pieces that a prompt is computed in, as a list of (start, stop), where "
        "room[i] is what the others leave of step i. Each piece takes all the room there is, and no more than is missing; "
        "a step without room, or after the end, makes no piece. If the steps don't suffice, the rest stays uncomputed.",
        check=check_pieces,
        passed="each piece begins where the last one ended, wherever that was; 60 prompts by dice",
        hints=(
            "One number is all that has to be remembered from step to step: how far the prompt is computed.",
            "A step may have no room, and the prompt may be done before the steps are. Neither makes a piece.",
            "Nothing says that a piece ends where a block ends. It ends where the room ends, or the prompt.",
        ),
        reference="course.exercises.nb06.pieces",
    ),
    Exercise(
        id="06.chunks",
        title="split by budget",
        minutes=15,
        difficulty=2,
        spec="`num_tokens(request, budget_left, budget)` returns how many of the request's uncomputed tokens go into this "
        "step: all of them, as far as `budget_left` and `self.long_prefill_threshold` (0: no such limit) allow. A request "
        "that this leaves unfinished is a partial prefill: at most `self.max_partial_prefills` of those get tokens in one "
        "step, and the next one gets 0. Whoever is finished by the step is never held up by that limit, and whoever gets "
        "0 doesn't count. `begin_step()` starts the count anew.",
        check=check_chunks,
        passed="as much as there is room for, a few unfinished ones a step; 12 texts at four budgets say what they say whole",
        hints=(
            "Three numbers limit it: what is missing, what is left, and the threshold. The smallest of them wins.",
            "A threshold of 0 means that there is none. And it is a limit for one prompt in one step, not for the prompt as "
            "a whole: its next piece comes with the next step.",
            "Work out n first. If n is all that is missing, that request will be finished, and nothing has to be counted. "
            "Otherwise look at the count, and raise it only if n is more than 0.",
        ),
        reference="scheduler.chunking.ChunkedPrefill",
        methods=("num_tokens",),
    ),
    Exercise(
        id="06.last_chunk",
        title="sample only on the last chunk",
        minutes=12,
        difficulty=2,
        spec="`rows_to_sample(batch)`: batch is a list of (request, n), in the order in which their tokens lie end to end in "
        "the flattened batch; n tokens of the request are about to be computed. It returns a list of (request_id, row) for "
        "those that have no uncomputed token left after this step: row is the place, in the flattened batch, of the "
        "request's last token.",
        check=check_rows,
        passed="nobody is sampled in the middle, a pushed-out one only when all of its words are back; 60 steps by dice",
        hints=(
            "Walk along the batch and keep the place where the next request begins. Its last token lies just before that.",
            "An unfinished prompt has no row to sample, but its tokens lie in the batch all the same: those behind it start "
            "later.",
            "Finished with what? Not with the prompt: somebody who was pushed out has said something already, and these "
            "words have to be computed again as well. `num_uncomputed_tokens` counts both.",
        ),
        reference="course.exercises.nb06.rows_to_sample",
    ),
    Exercise(
        id="06.observe",
        title="the budget that keeps a promise",
        minutes=15,
        difficulty=3,
        spec="`observe(num_tokens, seconds)` is told of each step. One of fewer tokens than `self.found` that kept the target "
        "(`seconds <= self.target`) changes nothing. Any other says what would have been right: num_tokens · target / "
        "seconds tokens (as many as one likes, if it took no time). `self.found` becomes that, but at most doubles and at "
        "most halves, is rounded down to a whole number, and stays within `self.smallest` and `self.largest`.",
        check=check_observe,
        passed="climbs to the target on three lines of costs and never passes it, and survives odd steps",
        hints=(
            "If 64 tokens took 0.8 of the target, 80 would be right if a step had no fixed part. It has one, so 80 take less "
            "than the target, and the next step says by how much.",
            "Four limits in this order: half and double of what it was; rounding down; smallest and largest. And mind a "
            "division by 0.",
            "A step of 10 tokens in 0.3 s says nothing about 400: nobody tried. But if those 10 took longer than the "
            "target, 400 were certainly too many.",
        ),
        reference="scheduler.budget.AdaptiveBudget",
        methods=("observe",),
    ),
    BugHunt(
        id="06.stream",
        title="bug hunt: a first token far too early",
        minutes=15,
        difficulty=3,
        spec="`after_step(plan, requests)` is called after each step, with its plan and everybody's `Request` by name. It "
        "returns an event (name, token id, text) for each request that gained a token in this step, in the order of the "
        "plan, and none for anybody else. A request gains one token at most; each is sent once, in the step in which it "
        "came. `num_sent` counts the events of each request.",
        check=check_stream,
        passed="every token once, in its own step: prompts in pieces, somebody pushed out, 24 runs by dice",
        hints=(
            "Who is in the plan has been computed a little further. Who has gained a token? Compare what a request has "
            "said before and after.",
            "“If nothing was said yet, send nothing” closes one way in. Find the request that has said something, and still "
            "gains nothing in a step.",
            "Somebody who was pushed out comes back with all of their words, in pieces. Their last word is no news. And one "
            "uncomputed token is no proof either: the last piece of a prompt may be a single token. What has the client "
            "got already?",
        ),
        reference="course.exercises.nb06.MendedStream",
        methods=("after_step",),
        planted="course.exercises.nb06_planted.EagerStream",
        seen_in="deepjavalibrary/djl-serving#2299",
    ),
)
