"""Right and wrong answers to the exercises of notebook 06: what the checks must accept and must refuse."""

from __future__ import annotations

from itertools import accumulate, pairwise

from labcore.course.exercises.nb06 import MendedStream, pieces, rows_to_sample
from labcore.course.exercises.nb06_planted import EagerStream
from labcore.scheduler.budget import AdaptiveBudget
from labcore.scheduler.chunking import ChunkedPrefill, ChunkPolicy


def pieces_by_edges(num_tokens, room):
    edges = [min(edge, num_tokens) for edge in accumulate(room, initial=0)]
    return [(start, stop) for start, stop in pairwise(edges) if start != stop]


def pieces_that_begin_at_nought(num_tokens, room):
    return [(0, stop - start) for start, stop in pieces(num_tokens, room)]


def pieces_beyond_the_end(num_tokens, room):
    edges = list(accumulate(room, initial=0))
    return [(start, stop) for start, stop in pairwise(edges) if start < num_tokens and start != stop]


def pieces_with_empty_ones(num_tokens, room):
    edges = [min(edge, num_tokens) for edge in accumulate(room, initial=0)]
    return list(pairwise(edges))


def pieces_of_whole_blocks(num_tokens, room, block=4):
    cut, start = [], 0
    for left in room:
        n = min(left, num_tokens - start)
        if start + n < num_tokens:
            n = max(0, (start + n) // block * block - start)
        if n:
            cut.append((start, start + n))
            start += n
    return cut


def pieces_and_a_rest(num_tokens, room):
    cut = pieces(num_tokens, room)
    done = cut[-1][1] if cut else 0
    return cut + ([(done, num_tokens)] if done < num_tokens else [])


class ByCases(ChunkPolicy):
    def __init__(self, max_partial_prefills=4, long_prefill_threshold=0):
        self.most, self.threshold = max_partial_prefills, long_prefill_threshold
        self.begin_step()

    def begin_step(self):
        self.unfinished = []

    def num_tokens(self, request, budget_left, budget):
        missing = request.num_uncomputed_tokens
        room = budget_left
        if self.threshold and self.threshold < room:
            room = self.threshold
        if missing <= room:
            return missing
        if room == 0 or len(self.unfinished) >= self.most:
            return 0
        self.unfinished.append(request)
        return room


class TakesAllItWants(ChunkedPrefill):
    def num_tokens(self, request, budget_left, budget):
        return request.num_uncomputed_tokens


class TakesFromTheWholeBudget(ChunkedPrefill):
    def num_tokens(self, request, budget_left, budget):
        return super().num_tokens(request, budget, budget)


class ThresholdOfNoughtIsALimit(ChunkedPrefill):
    def num_tokens(self, request, budget_left, budget):
        return min(request.num_uncomputed_tokens, budget_left, self.long_prefill_threshold)


class CountsTheFinished(ChunkedPrefill):
    def num_tokens(self, request, budget_left, budget):
        if self._num_partial == self.max_partial_prefills:
            return 0
        n = min(request.num_uncomputed_tokens, budget_left, self.long_prefill_threshold or budget_left)
        self._num_partial += n > 0
        return n


class CountsThoseWhoGetNothing(ChunkedPrefill):
    def num_tokens(self, request, budget_left, budget):
        n = min(request.num_uncomputed_tokens, budget_left, self.long_prefill_threshold or budget_left)
        if n == request.num_uncomputed_tokens:
            return n
        if self._num_partial == self.max_partial_prefills:
            return 0
        self._num_partial += 1
        return n


class CountsForEver(ChunkedPrefill):
    def begin_step(self):
        pass


class WholeBlocksOnly(ChunkedPrefill):
    """Ends pieces where blocks end: with a budget below a block, nobody ever gets anywhere."""

    def num_tokens(self, request, budget_left, budget):
        n = super().num_tokens(request, budget_left, budget)
        return n if n == request.num_uncomputed_tokens else n // 4 * 4


def rows_by_ends(batch):
    ends = accumulate(n for _, n in batch)
    return [(r.request_id, end - 1) for (r, n), end in zip(batch, ends, strict=True) if n >= r.num_uncomputed_tokens]


def rows_of_everybody(batch):
    ends = accumulate(n for _, n in batch)
    return [(request.request_id, end - 1) for (request, _), end in zip(batch, ends, strict=True)]


def rows_when_the_prompt_is_done(batch):
    ends = accumulate(n for _, n in batch)
    return [
        (r.request_id, end - 1)
        for (r, n), end in zip(batch, ends, strict=True)
        if r.num_computed_tokens + n >= len(r.prompt_token_ids)
    ]


def rows_of_the_first_token(batch):
    rows, start = [], 0
    for request, n in batch:
        if n == request.num_uncomputed_tokens:
            rows.append((request.request_id, start))
        start += n
    return rows


def rows_as_if_the_others_were_not_there(batch):
    rows, end = [], 0
    for request, n in batch:
        if n == request.num_uncomputed_tokens:
            end += n
            rows.append((request.request_id, end - 1))
    return rows


def rows_one_too_far(batch):
    return [(name, row + 1) for name, row in rows_to_sample(batch)]


class ObservesByCases(AdaptiveBudget):
    def observe(self, num_tokens, seconds):
        in_time = seconds <= self.target
        if in_time and num_tokens < self.found:
            return
        low, high = self.found / 2, self.found * 2
        if seconds == 0 or num_tokens * self.target > high * seconds:
            right = high
        else:
            right = max(low, num_tokens * self.target / seconds)
        self.found = max(self.smallest, min(self.largest, int(right)))


class AddsAndHalves(AdaptiveBudget):
    """As TCP does: up by a little, down by a half."""

    def observe(self, num_tokens, seconds):
        if seconds > self.target:
            self.found = max(self.smallest, self.found // 2)
        elif num_tokens >= self.found:
            self.found = min(self.largest, self.found + 32)


class TrustsEveryStep(AdaptiveBudget):
    def observe(self, num_tokens, seconds):
        if num_tokens < self.found and seconds <= self.target:
            return
        right = int(num_tokens * self.target / seconds) if seconds > 0 else self.largest
        self.found = min(max(right, self.smallest), self.largest)


class LearnsFromIdleSteps(AdaptiveBudget):
    def observe(self, num_tokens, seconds):
        right = num_tokens * self.target / seconds if seconds > 0 else self.largest
        right = min(max(right, self.found / 2), self.found * 2)
        self.found = min(max(int(right), self.smallest), self.largest)


class HearsOnlyFullSteps(AdaptiveBudget):
    def observe(self, num_tokens, seconds):
        if num_tokens >= self.found:
            super().observe(num_tokens, seconds)


class ClampsAgainstTheStep(AdaptiveBudget):
    """Doubles and halves what was computed, not what was allowed."""

    def observe(self, num_tokens, seconds):
        if num_tokens < self.found and seconds <= self.target:
            return
        right = num_tokens * self.target / seconds if seconds > 0 else self.largest
        right = min(max(right, num_tokens / 2), num_tokens * 2)
        self.found = min(max(int(right), self.smallest), self.largest)


class DistrustsAStepOnTheTarget(AdaptiveBudget):
    def observe(self, num_tokens, seconds):
        if num_tokens < self.found and seconds == self.target:
            seconds *= 1 + 1e-12
        super().observe(num_tokens, seconds)


class DividesByNought(AdaptiveBudget):
    def observe(self, num_tokens, seconds):
        if num_tokens < self.found and seconds <= self.target:
            return
        right = min(max(num_tokens * self.target / seconds, self.found / 2), self.found * 2)
        self.found = min(max(int(right), self.smallest), self.largest)


class KeepsFractions(AdaptiveBudget):
    def observe(self, num_tokens, seconds):
        if num_tokens < self.found and seconds <= self.target:
            return
        right = num_tokens * self.target / seconds if seconds > 0 else self.largest
        right = min(max(right, self.found / 2), self.found * 2)
        self.found = min(max(right, self.smallest), self.largest)


class ComparesWithTheLastStep(EagerStream):
    """Remembers how long each answer was, and sends what is new."""

    length = None

    def after_step(self, plan, requests):
        self.length = {} if self.length is None else self.length
        events = []
        for name in plan.num_scheduled_tokens:
            said = requests[name].output_token_ids
            if len(said) > self.length.get(name, 0):
                events.append((name, said[-1], self.spell([said[-1]])))
            self.length[name] = len(said)
        return events


class SendsNoPlaceholders(EagerStream):
    def after_step(self, plan, requests):
        return [event for event in super().after_step(plan, requests) if event[1] >= 0]


class SendsForSingleTokens(EagerStream):
    """Takes a step of one token for decoding: the first token of every answer is lost."""

    def after_step(self, plan, requests):
        events = super().after_step(plan, requests)
        return [event for event in events if event[1] >= 0 and plan.num_scheduled_tokens[event[0]] == 1]


class SendsForTheCaughtUp(EagerStream):
    """One uncomputed token after the step: it must be a new one. Or the last one of a prompt."""

    def after_step(self, plan, requests):
        events = super().after_step(plan, requests)
        return [event for event in events if requests[event[0]].num_uncomputed_tokens == 1]


class SendsEverythingAgain(EagerStream):
    def after_step(self, plan, requests):
        said = {name: requests[name].output_token_ids for name in plan.num_scheduled_tokens}
        return [(name, token, self.spell([token])) for name, tokens in said.items() for token in tokens]


class SendsNothing(EagerStream):
    def after_step(self, plan, requests):
        return []


RIGHT = {
    "06.pieces": [pieces, pieces_by_edges],
    "06.chunks": [ChunkedPrefill, ByCases],
    "06.last_chunk": [rows_to_sample, rows_by_ends],
    "06.observe": [AdaptiveBudget, ObservesByCases],
    "06.stream": [MendedStream, ComparesWithTheLastStep],
}

WRONG = {
    "06.pieces": [
        (pieces_that_begin_at_nought, "its pieces"),
        (pieces_beyond_the_end, "its pieces"),
        (pieces_with_empty_ones, "its pieces"),
        (pieces_of_whole_blocks, "its pieces"),
        (pieces_and_a_rest, "its pieces"),
    ],
    "06.chunks": [
        (TakesAllItWants, "has 30 left"),
        (TakesFromTheWholeBudget, "has 30 left"),
        (ThresholdOfNoughtIsALimit, "tokens to compute now"),
        (CountsTheFinished, "max_partial_prefills is 1"),
        (CountsThoseWhoGetNothing, "left no prompt unfinished so far"),
        (CountsForEver, "after begin_step()"),
        (WholeBlocksOnly, "has 30 left"),
    ],
    "06.last_chunk": [
        (rows_of_everybody, "the first 6 of di's 20"),
        (rows_when_the_prompt_is_done, "cy was pushed out"),
        (rows_of_the_first_token, "computed whole"),
        (rows_as_if_the_others_were_not_there, "between them 6 of di's 20"),
        (rows_one_too_far, "ana decodes"),
    ],
    "06.observe": [
        (AddsAndHalves, "0.79 of a target"),
        (TrustsEveryStep, "a tenth of the target"),
        (LearnsFromIdleSteps, "the step was not full"),
        (ClampsAgainstTheStep, "10 tokens took twice the target"),
        (DistrustsAStepOnTheTarget, "10 tokens took exactly the target"),
        (HearsOnlyFullSteps, "300 tokens took 1.19 s"),
        (DividesByNought, "ZeroDivisionError"),
        (KeepsFractions, "found"),
    ],
    "06.stream": [
        (EagerStream, "budget 32"),
        (SendsNoPlaceholders, "comes back in pieces"),
        (SendsForSingleTokens, "computed whole"),
        (SendsForTheCaughtUp, "a single letter"),
        (SendsEverythingAgain, "computed whole"),
        (SendsNothing, "computed whole"),
    ],
}
