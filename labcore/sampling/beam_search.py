"""Beam search: keep the few likeliest texts alive, and let the others go. Built in notebook 05.

The search itself knows no model and no memory: it is given candidates and says who lives on, from whom.

    beams            candidates                          the best 2 that go on          who they come from
    "the"   -0.5     "the cat" -1.2   "the dog" -1.6     "the cat"  -1.2                beam 0
    "a"     -0.9     "a cat"   -2.5   "a bird"  -1.5     "a bird"   -1.5                beam 1

In the engine a beam is a request. One that goes on in two ways is forked, and one that goes on in none is dropped: its
blocks change owners, and no key or value is ever moved, but for a partly filled tail that two beams want to write.

Source: the algorithm and its end are those of transformers' beam search; Kwon et al. 2023, section 4.4, for the sharing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from labcore.sampling_params import BeamSearchParams


@dataclass(frozen=True)
class Beam:
    """A text on its way: output tokens and the sum of their log-probabilities (natural log)."""

    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A text that is finished.

    score           logprob / len(token_ids) ** length_penalty
    finish_reason   "stop" or "length"
    """

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class Branch:
    """A beam of the next round: the number of the beam that it continues, the token that it adds."""

    parent: int
    token_id: int


class BeamSearch:
    """One search, round by round.

    params          width and length penalty
    eos_token_ids   tokens that finish a text; ignored if the params say so
    max_tokens      output tokens at which every text is finished
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int], max_tokens: int) -> None:
        self.params = params
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.max_tokens = max_tokens
        self.beams = [Beam((), 0.0)]
        self.finished: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """How many of its likeliest tokens each beam must offer: enough to go on even if all the best are end tokens."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    @property
    def done(self) -> bool:
        """No beam is left, or as many texts are finished as were asked for and no beam can do better any more.

        As in transformers, what a beam can still reach is judged by its score as it stands.
        """
        if not self.beams:
            return True
        if len(self.finished) < self.params.beam_width:
            return False
        return self._score(self.beams[0].token_ids, self.beams[0].logprob) <= self.finished[-1].score

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Branch]:
        """One round: the beams of the next one, best first.

        candidates   for each beam, `num_candidates` of its likeliest (token id, log-probability)
        A text that ends counts only if it is among the best `beam_width` of the round.
        """
        ranked = sorted(
            (-(beam.logprob + logprob), parent, token_id)
            for parent, (beam, offers) in enumerate(zip(self.beams, candidates, strict=True))
            for token_id, logprob in offers
        )[: self.num_candidates]
        branches, beams = [], []
        for rank, (cost, parent, token_id) in enumerate(ranked):
            token_ids = (*self.beams[parent].token_ids, token_id)
            if token_id in self.eos_token_ids or len(token_ids) == self.max_tokens:
                if rank < self.params.beam_width:
                    self._finish(token_ids, -cost)
            elif len(beams) < self.params.beam_width:
                beams.append(Beam(token_ids, -cost))
                branches.append(Branch(parent, token_id))
        self.beams = beams
        if self.done:
            self.beams, branches = [], []
        return branches

    def best(self) -> list[Hypothesis]:
        """The best texts, best first; while the search goes on, the beams stand in for what is not finished yet."""
        running = [
            Hypothesis(b.token_ids, b.logprob, self._score(b.token_ids, b.logprob), "")
            for b in self.beams
            if b.token_ids
        ]
        return sorted([*self.finished, *running], key=lambda h: -h.score)[: self.params.beam_width]

    def _finish(self, token_ids: tuple[int, ...], logprob: float) -> None:
        reason = "stop" if token_ids[-1] in self.eos_token_ids else "length"
        self.finished.append(Hypothesis(token_ids, logprob, self._score(token_ids, logprob), reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.params.beam_width :]

    def _score(self, token_ids: tuple[int, ...], logprob: float) -> float:
        return logprob / len(token_ids) ** self.params.length_penalty
