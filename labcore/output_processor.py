"""From sampled tokens to what a caller sees: text, log-probabilities, and the moment when a request is done."""

from __future__ import annotations

from collections.abc import Sequence

from labcore.detokenize import Detokenizer
from labcore.outputs import CompletionOutput, RequestMetrics, RequestOutput
from labcore.request import Request
from labcore.sampling import SampledToken


class Completion:
    """One growing continuation: the request that computes it and the text that it has become so far."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.output = CompletionOutput(index, text="", token_ids=request.output_token_ids)
        if request.params.logprobs is not None:
            self.output.cumulative_logprob, self.output.logprobs = 0.0, []

    def append(self, token: SampledToken, eos_token_ids: Sequence[int]) -> str | None:
        """Take one more token in. Returns the finish reason if it is the last one."""
        request, output = self.request, self.output
        request.output_token_ids.append(token.token_id)
        self.detokenizer.append(token.token_id)
        if output.logprobs is not None:
            output.cumulative_logprob += token.logprob
            output.logprobs.append(token.logprobs)
        reason = self._finish_reason(token.token_id, eos_token_ids)
        if reason is not None:
            self.finish(reason)
        output.text = self.detokenizer.text
        return reason

    def finish(self, reason: str) -> None:
        self.detokenizer.finish()
        self.output.text = self.detokenizer.text
        self.output.finish_reason = self.request.finish_reason = reason

    def _finish_reason(self, token_id: int, eos_token_ids: Sequence[int]) -> str | None:
        params, num_output = self.request.params, len(self.request.output_token_ids)
        if num_output >= params.min_tokens:
            if token_id in eos_token_ids and not params.ignore_eos:
                return "stop"
            if token_id in params.stop_token_ids or self.detokenizer.stop_hit is not None:
                return "stop"
        return "length" if num_output >= self.request.max_tokens else None


class CompletionGroup:
    """All continuations of one prompt: what one `request_id` of the caller stands for."""

    def __init__(self, request_id: str, completions: list[Completion]) -> None:
        self.request_id = request_id
        self.completions = completions

    @property
    def requests(self) -> list[Request]:
        return [completion.request for completion in self.completions]

    @property
    def finished(self) -> bool:
        return all(completion.output.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        """A snapshot, cumulative: later steps don't change it."""
        first = self.completions[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=first.prompt_token_ids,
            num_cached_tokens=first.num_cached_tokens,
            outputs=[snapshot(completion.output) for completion in self.completions],
            metrics=self._metrics(),
            finished=self.finished,
        )

    def _metrics(self) -> RequestMetrics:
        requests = self.requests
        first_tokens = [m.first_token_time for m in (r.metrics for r in requests) if m.first_token_time is not None]
        return RequestMetrics(
            arrival_time=requests[0].arrival_time,
            first_scheduled_time=requests[0].metrics.first_scheduled_time,
            first_token_time=min(first_tokens, default=None),
            finished_time=max(r.metrics.finished_time for r in requests) if self.finished else None,
            num_preemptions=sum(request.num_preemptions for request in requests),
        )


def snapshot(output: CompletionOutput) -> CompletionOutput:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return CompletionOutput(
        output.index, output.text, list(output.token_ids), output.finish_reason, output.cumulative_logprob, logprobs
    )
