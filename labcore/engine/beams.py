"""A beam search in the engine: each beam is a sequence, forked if it has several branches, dropped if it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labcore.engine.request_group import GroupUpdate, RequestGroup
from labcore.models import LoadedModel
from labcore.models.token_decoder import TokenDecoder
from labcore.outputs import CompletionOutput, RequestOutput
from labcore.request import Request
from labcore.sampling.beam_search import BeamSearch, Hypothesis
from labcore.sampling.text_stream import TextStream
from labcore.sampling_params import BeamSearchParams


@dataclass(frozen=True)
class Candidates:
    """A beam's top next tokens, (token id, log-probability), and how often it had been preempted when they were computed."""

    tokens: list[tuple[int, float]]
    num_preemptions: int


class BeamGroup(RequestGroup):
    """All beams of one prompt. A round of the search takes place when the candidates of every beam are there.

    They may come in different steps: a preempted beam is still being computed while its siblings wait. A beam's
    candidates are void once it is preempted: it is computed again, and has new ones.

    Times and preemptions are those of the whole search, which goes on when its first beam is dropped.
    """

    can_fork = False

    @classmethod
    def create(
        cls,
        request_id: str,
        params: BeamSearchParams,
        new_request: Callable[[str, int], Request],
        loaded: LoadedModel,
        beam_search: type[BeamSearch] = BeamSearch,
    ) -> BeamGroup:
        """A search that begins with one beam. new_request: makes the sequence of an id and a number."""
        root = new_request(request_id, 0)
        return cls(request_id, root, beam_search(params, loaded.eos_token_ids, root.max_tokens), loaded.decoder)

    def __init__(self, request_id: str, root: Request, search: BeamSearch, decoder: TokenDecoder | None) -> None:
        self.request_id = request_id
        self.requests = [root]
        self.search = search
        self._root = root
        self._stream = None if decoder is None else TextStream(decoder, root.prompt_token_ids)
        self._candidates: dict[str, Candidates] = {}
        self._num_beams = 1
        self._finish_reason: str | None = None
        self._preemptions_of_dropped = 0

    @property
    def num_candidates(self) -> int:
        """Top tokens that the search needs of each beam."""
        return self.search.num_candidates

    def on_sampled(self, request: Request, sampled: list[tuple[int, float]], now: float) -> GroupUpdate:
        """The candidates of one beam are there. Nothing changes before those of the last beam are."""
        self._candidates[request.request_id] = Candidates(sampled, request.num_preemptions)
        parents = self.requests
        if not all(self._has_candidates(beam) for beam in parents):
            return GroupUpdate()
        branches = self.search.advance([self._candidates[beam.request_id].tokens for beam in parents])
        self._candidates.clear()
        update, continued, advanced = GroupUpdate(), set(), []
        for branch in branches:
            beam = parents[branch.parent]
            if branch.parent in continued:
                beam = self._child_of(beam)
                update.forked.append((beam, parents[branch.parent]))
            continued.add(branch.parent)
            advanced.append((beam, branch.token_id))
        for beam, token_id in advanced:  # only now: children start from their parent's tokens before this round
            beam.output_token_ids.append(token_id)
        self.requests = update.advanced = [beam for beam, _ in advanced]
        update.finished = [beam for i, beam in enumerate(parents) if i not in continued]
        self._drop(update.finished, "dropped")
        metrics = self._root.metrics
        metrics.first_token_time = now if metrics.first_token_time is None else metrics.first_token_time
        metrics.finished_time = now if self.finished else None
        return update

    def output(self) -> RequestOutput:
        """The best hypotheses so far, best first."""
        outputs = [
            CompletionOutput(
                index=k,
                text=self._text(text),
                token_ids=list(text.token_ids),
                finish_reason="error" if self.error is not None else text.finish_reason or self._finish_reason,
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
        return self._preemptions_of_dropped + sum(beam.num_preemptions for beam in self.requests)

    def _text(self, hypothesis: Hypothesis) -> str:
        """The text behind the prompt, as `generate` gives it: without the end token, and without half a character."""
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
        unfinished, self.requests, self._finish_reason = self.requests, [], reason
        self._drop(unfinished, reason)
        self._root.metrics.finished_time = now
        return unfinished

    def _drop(self, beams: Sequence[Request], reason: str) -> None:
        for beam in beams:
            beam.finish_reason = reason
            self._preemptions_of_dropped += beam.num_preemptions

    def _has_candidates(self, beam: Request) -> bool:
        candidates = self._candidates.get(beam.request_id)
        return candidates is not None and candidates.num_preemptions == beam.num_preemptions

    def _child_of(self, parent: Request) -> Request:
        """A sequence with the parent's tokens so far, right behind it in the order of the policy."""
        child = parent.fork(f"{self.request_id}/{self._num_beams}", beam_id=self._num_beams)
        self._num_beams += 1
        return child


def top_logprobs(logits: Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """For each row of logits, [S, V], its `counts[i]` top (token id, log-probability), best first."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = torch.topk(logprobs, min(max(counts), logits.shape[-1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [list(zip(row_ids[:n], row_values[:n], strict=True)) for row_ids, row_values, n in rows]
