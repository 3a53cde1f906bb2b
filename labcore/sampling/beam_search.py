"""Beam search over candidate log-probabilities, independent of model and KV cache. Built in notebook 05.

    beams            candidates                          next beams (width 2)           parent
    "the"   -0.5     "the cat" -1.2   "the dog" -1.6     "the cat"  -1.2                beam 0
    "a"     -0.9     "a cat"   -2.5   "a bird"  -1.5     "a bird"   -1.5                beam 1

In the engine a beam is a sequence: a parent of several branches is forked, a parent of none is freed. Blocks are
shared; only a partly filled last block that two beams write to is copied.

Sources: transformers' beam search (algorithm, stopping rule); Kwon et al. 2023, section 4.4 (sharing).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from labcore.sampling_params import BeamSearchParams


@dataclass(frozen=True)
class Beam:
    """An unfinished sequence: output tokens and the sum of their log-probabilities (natural log)."""

    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence.

    score           logprob / len(token_ids) ** length_penalty
    finish_reason   "stop" or "length"
    """

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class Branch:
    """A beam of the next step: the index of its parent beam, and the token that it appends."""

    parent: int
    token_id: int


class BeamSearch:
    """One beam search, advanced step by step.

    params          beam width and length penalty
    eos_token_ids   tokens that finish a sequence; unused with params.ignore_eos
    max_tokens      output tokens at which a sequence is finished
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int], max_tokens: int) -> None:
        self.params = params
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.max_tokens = max_tokens
        self.beams = [Beam((), 0.0)]
        self.finished: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Top tokens needed per beam: enough to fill the beams even if the best candidates are all EOS."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    @property
    def done(self) -> bool:
        """No beam is left, or beam_width hypotheses are finished and none scores below the best beam.

        As in transformers, a beam's current score is taken for the best that it can reach.
        """
        if not self.beams:
            return True
        if len(self.finished) < self.params.beam_width:
            return False
        return self._score(self.beams[0].token_ids, self.beams[0].logprob) <= self.finished[-1].score

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Branch]:
        """Advance by one step; returns the next beams, best first.

        candidates   per beam, its top `num_candidates` (token id, log-probability)
        A candidate that ends a sequence counts only if it ranks among the step's best `beam_width`.
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
        """The best `beam_width` hypotheses, best first; unfinished beams are included while the search runs."""
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
