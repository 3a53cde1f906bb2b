"""A request in the engine: its tokens, its block table, and how many tokens are computed.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens, of which `num_computed_tokens` have their
KV in the pool. Each step computes some of the others; when none is left, the next token is sampled.

    prompt            output
    ┌───────────────┐┌──────┐
    t0 t1 t2 t3 t4 t5 t6 t7       num_tokens 8
    ▓▓ ▓▓ ▓▓ ▓▓ ▓▓ ▓▓ ▓▓ ░░       num_computed_tokens 7: one to go, then the next token is sampled
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from labcore.outputs import RequestMetrics
from labcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from labcore.kvcache.blocks import BlockTable


class RequestStatus(Enum):
    """A request is in exactly one of these states; `Engine.check_integrity` checks it."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence of tokens. A call with n > 1 makes n of these: a prompt owner, and n - 1 siblings that share its prompt.

    arrival       position in the order of arrival; a preempted request keeps it
    beam_id       order among the beams of one search, which share their arrival
    arrival_step  scheduler step in which it was queued
    max_tokens    most output tokens, already cut to what max_model_len leaves
    seed          resolved: the request's own, or one derived from the engine's
    cache_salt    prefixes are shared only between requests with the same salt
    prompt_owner  id of the request that computes this one's prompt, while it waits for that
    block_hashes, cached_chain   the prefix cache's own: (hash, content) of its full blocks, and those found or registered
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    max_tokens: int
    seed: int
    priority: int = 0
    arrival_time: float = 0.0

    cache_salt: str = ""
    use_prefix_cache: bool = True

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    arrival_step: int = 0
    beam_id: int = 0
    num_computed_tokens: int = 0
    table: BlockTable | None = None
    prompt_owner: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    block_hashes: list[tuple[bytes, bytes]] = field(default_factory=list, repr=False)
    cached_chain: list[Any] = field(default_factory=list, repr=False)
    metrics: RequestMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(arrival_time=self.arrival_time)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together, computed or not."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still lack their KV; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens start … stop - 1 of prompt and output laid end to end."""
        split = len(self.prompt_token_ids)
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[: max(0, stop - split)]

    def fork(self, request_id: str, **own: Any) -> Request:
        """A request with the same tokens so far and, but for `own`, the same parameters.

        It has no blocks and is in no queue: that is up to `Scheduler.fork`.
        """
        return replace(
            self,
            request_id=request_id,
            status=RequestStatus.WAITING,
            output_token_ids=list(self.output_token_ids),
            num_computed_tokens=0,
            table=None,
            prompt_owner=None,
            num_cached_tokens=0,
            num_preemptions=0,
            block_hashes=[],
            cached_chain=[],
            **own,
        )
