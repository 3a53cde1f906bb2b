"""Outputs of the engine: plain data, cumulative, of the same form at every step of a request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CompletionOutput:
    """One sequence generated from a prompt, up to the current step.

    finish_reason is None while it is running, then "stop" (end token, stop id or stop string), "length", "abort" or "error":
    then `RequestOutput.error` gives the reason, and tokens and text are those from before the failure.
    logprobs holds a dict per token, {token id: log-probability}, if the request asked for them: natural log, of the model's
    distribution before temperature, penalties and truncation.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None


@dataclass
class RequestMetrics:
    """Timestamps of one request, in seconds on the engine's clock.

    queue time = first_scheduled_time - arrival_time; TTFT = first_token_time - arrival_time.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds; None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e(self) -> float | None:
        """Arrival to last token, seconds; None before the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass
class RequestOutput:
    """All sequences of one prompt.

    num_cached_tokens   prompt tokens whose KV came from the prefix cache
    error               why the request failed, in one line; None if it did not. Other requests are not affected
    """

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    error: str | None = None
    prompt: str | None = field(default=None, repr=False)
