"""A beam search in the engine: each beam is a request, forked where it goes on in two ways, dropped where in none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labcore.engine.request_group import Change, Group
from labcore.models.token_decoder import TokenDecoder
from labcore.outputs import CompletionOutput, RequestOutput
from labcore.request import Request
from labcore.sampling.beam_search import BeamSearch, Hypothesis
from labcore.sampling.text_stream import TextStream


@dataclass(frozen=True)
class Offer:
    """A beam's likeliest next tokens, (token id, log-probability), and how often it had been preempted when it made them."""

    candidates: list[tuple[int, float]]
    num_preemptions: int


class BeamGroup(Group):
    """All beams of one prompt. A round of the search takes place when every beam's candidates are there.

    They may come in different steps: a beam that was preempted is still being computed while its siblings stand ready.
    What a beam has offered is void once it is preempted: it is computed again, and offers again.

    Times and preemptions are the search's, which goes on when its first beam is dropped.
    """

    def __init__(self, request_id: str, root: Request, search: BeamSearch, decoder: TokenDecoder | None) -> None:
        self.request_id = request_id
        self.requests = [root]
        self.search = search
        self._root = root
        self._stream = None if decoder is None else TextStream(decoder, root.prompt_token_ids)
        self._offers: dict[str, Offer] = {}
        self._births = 1
        self._ended_by: str | None = None
        self._preemptions_of_ended = 0

    def take(self, request: Request, candidates: list[tuple[int, float]], now: float) -> Change:
        """A beam's likeliest next tokens are there. Nothing changes before the last beam's are."""
        self._offers[request.request_id] = Offer(candidates, request.num_preemptions)
        parents = self.requests
        if not all(self._has_offered(beam) for beam in parents):
            return Change()
        branches = self.search.advance([self._offers[beam.request_id].candidates for beam in parents])
        self._offers.clear()
        change, continued, grown = Change(), set(), []
        for branch in branches:
            beam = parents[branch.parent]
            if branch.parent in continued:
                beam = self._child_of(beam)
                change.forks.append((beam, parents[branch.parent]))
            continued.add(branch.parent)
            grown.append((beam, branch.token_id))
        for beam, token_id in grown:  # only now: children start from their parent's tokens before this round
            beam.output_token_ids.append(token_id)
        self.requests = change.grown = [beam for beam, _ in grown]
        change.ended = [beam for i, beam in enumerate(parents) if i not in continued]
        self._let_go(change.ended, "dropped")
        metrics = self._root.metrics
        metrics.first_token_time = now if metrics.first_token_time is None else metrics.first_token_time
        metrics.finished_time = now if self.finished else None
        return change

    def output(self) -> RequestOutput:
        """The best texts so far, best first."""
        outputs = [
            CompletionOutput(
                index=k,
                text=self._text(text),
                token_ids=list(text.token_ids),
                finish_reason="error" if self.error is not None else text.finish_reason or self._ended_by,
                cumulative_logprob=text.logprob,
            )
            for k, text in enumerate(self.search.best())
        ]
        root = self._root
        return RequestOutput(
            self.request_id,
            root.prompt_token_ids,
            root.num_cached_tokens,
            outputs,
            replace(root.metrics, num_preemptions=self._num_preemptions),
            finished=self.finished,
            error=self.error,
        )

    @property
    def _num_preemptions(self) -> int:
        return self._preemptions_of_ended + sum(beam.num_preemptions for beam in self.requests)

    def _text(self, hypothesis: Hypothesis) -> str:
        """As `generate` gives it: behind the prompt, without the end token, and without half a character at the end."""
        if self._stream is None:
            return ""
        ended = hypothesis.finish_reason == "stop"
        try:
            return self._stream.text_of(hypothesis.token_ids[:-1] if ended else hypothesis.token_ids)
        except Exception:
            if self.error is None:
                raise
            return ""

    def _end(self, reason: str, now: float) -> list[Request]:
        ended, self.requests, self._ended_by = self.requests, [], reason
        self._let_go(ended, reason)
        self._root.metrics.finished_time = now
        return ended

    def _let_go(self, beams: Sequence[Request], reason: str) -> None:
        for beam in beams:
            beam.finish_reason = reason
            self._preemptions_of_ended += beam.num_preemptions

    def _has_offered(self, beam: Request) -> bool:
        offer = self._offers.get(beam.request_id)
        return offer is not None and offer.num_preemptions == beam.num_preemptions

    def _child_of(self, parent: Request) -> Request:
        """A request with the parent's tokens so far, right behind it in the order of arrival."""
        child = parent.fork(f"{self.request_id}/{self._births}", birth=self._births)
        self._births += 1
        return child


def top_logprobs(logits: Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """For each row of logits, [S, V], its `counts[i]` likeliest (token id, log-probability)."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = torch.topk(logprobs, min(max(counts), logits.shape[-1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [list(zip(row_ids[:n], row_values[:n], strict=True)) for row_ids, row_values, n in rows]
