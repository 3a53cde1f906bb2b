"""n completions of one prompt: sampled tokens become text, log-probabilities and, in the end, a finish reason."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from labcore.engine.request_group import GroupUpdate, RequestGroup, sequence_ids
from labcore.models import LoadedModel
from labcore.outputs import CompletionOutput, RequestMetrics, RequestOutput
from labcore.request import Request
from labcore.sampling.detokenizer import Detokenizer
from labcore.sampling.sampler import SampledToken
from labcore.sampling_params import SamplingParams


class Completion:
    """One completion: the request that computes it, and its text so far."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.output = CompletionOutput(index, text="", token_ids=request.output_token_ids)
        if request.params.logprobs is not None:
            self.output.cumulative_logprob, self.output.logprobs = 0.0, []

    def append(self, token: SampledToken, eos_token_ids: Collection[int], now: float) -> str | None:
        """Append a sampled token. Returns the finish reason if it is the last one.

        If the tokenizer raises, the token and its log-probability are appended, and the text is as before.
        """
        request, output = self.request, self.output
        request.output_token_ids.append(token.token_id)
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if output.logprobs is not None:
            output.cumulative_logprob += token.logprob
            output.logprobs.append(token.logprobs)
        ended = self._is_end(token.token_id, eos_token_ids)
        if not ended:  # an end token is no text, whether or not the tokenizer calls it special
            self.detokenizer.append(token.token_id)
        reason = self._finish_reason(ended)
        if reason is not None:
            self.flush()
            self.end(reason, now)
        output.text = self.detokenizer.text
        return reason

    def flush(self) -> None:
        """No more tokens come: release the text that was held back for a stop string or half a character."""
        self.detokenizer.finish()
        self.output.text = self.detokenizer.text

    def end(self, reason: str, now: float) -> None:
        self.output.finish_reason = self.request.finish_reason = reason
        self.request.metrics.finished_time = now

    def fork(self, child: Request) -> Completion:
        """A completion with this one's tokens and text so far. child: the request that computes it from here on."""
        forked = Completion(0, child, self.detokenizer.fork())
        forked.output = replace(self.snapshot(), index=0, token_ids=child.output_token_ids)
        return forked

    def snapshot(self) -> CompletionOutput:
        logprobs = None if self.output.logprobs is None else list(self.output.logprobs)
        return replace(self.output, token_ids=list(self.output.token_ids), logprobs=logprobs)

    def _is_end(self, token_id: int, eos_token_ids: Collection[int]) -> bool:
        params = self.request.params
        if len(self.request.output_token_ids) < params.min_tokens:
            return False
        return token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)

    def _finish_reason(self, ended: bool) -> str | None:
        if ended or self.detokenizer.stop_hit is not None:
            return "stop"
        return "length" if len(self.request.output_token_ids) >= self.request.max_tokens else None


class CompletionGroup(RequestGroup):
    """n completions. The first request is the prompt owner; its siblings share the prompt's blocks once it is computed."""

    @classmethod
    def create(
        cls, request_id: str, params: SamplingParams, new_request: Callable[[str, int], Request], loaded: LoadedModel
    ) -> CompletionGroup:
        """n completions of a new prompt. new_request: makes the sequence of an id and a number."""
        completions: list[Completion] = []
        for k, name in enumerate(sequence_ids(request_id, params.n)):
            request = new_request(name, k)
            if completions:  # the same prompt: decoded once
                detokenizer = completions[0].detokenizer.fork()
            else:
                detokenizer = Detokenizer(loaded.decoder, request.prompt_token_ids, params)
            completions.append(Completion(k, request, detokenizer))
        return cls(request_id, completions, loaded.eos_token_ids)

    def __init__(self, request_id: str, completions: list[Completion], eos_token_ids: Collection[int]) -> None:
        self.request_id = request_id
        self.completions = completions
        self.requests = [completion.request for completion in completions]
        self._by_id = {completion.request.request_id: completion for completion in completions}
        self._eos_token_ids = eos_token_ids

    def on_sampled(self, request: Request, sampled: SampledToken, now: float) -> GroupUpdate:
        """A token was sampled for one of the completions."""
        reason = self._by_id[request.request_id].append(sampled, self._eos_token_ids, now)
        if reason is None:
            return GroupUpdate(advanced=[request])
        self.requests.remove(request)
        return GroupUpdate(advanced=[request], finished=[request])

    def fork(self, parent: Request, child: Request) -> CompletionGroup:
        """A group of one, which begins with the text of one of these. child: a request with the parent's tokens."""
        return CompletionGroup(child.request_id, [self._by_id[parent.request_id].fork(child)], self._eos_token_ids)

    def abort(self, now: float) -> list[Request]:
        for request in self.requests:
            self._by_id[request.request_id].flush()
        return super().abort(now)

    def output(self) -> RequestOutput:
        first = self.completions[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=first.prompt_token_ids,
            num_cached_tokens=min(first.num_cached_tokens, len(first.prompt_token_ids)),
            outputs=[completion.snapshot() for completion in self.completions],
            metrics=self._metrics(),
            finished=self.finished,
            error=self.error,
        )

    def _end(self, reason: str, now: float) -> list[Request]:
        unfinished, self.requests = self.requests, []
        for request in unfinished:
            self._by_id[request.request_id].end(reason, now)
        return unfinished

    def _metrics(self) -> RequestMetrics:
        """Metrics of the group as a whole: its earliest first token, its latest finish."""
        requests = [completion.request for completion in self.completions]
        first_tokens = [r.metrics.first_token_time for r in requests if r.metrics.first_token_time is not None]
        return RequestMetrics(
            arrival_time=requests[0].arrival_time,
            first_scheduled_time=requests[0].metrics.first_scheduled_time,
            first_token_time=min(first_tokens, default=None),
            finished_time=max(r.metrics.finished_time for r in requests) if self.finished else None,
            num_preemptions=sum(request.num_preemptions for request in requests),
        )
