"""Validation: a request that can't be served is rejected, by field, value and range, before it is queued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real

from labcore.config import EngineConfig
from labcore.kvcache.blocks import BlockPool
from labcore.models import LoadedModel
from labcore.sampling.stop_strings import special_stops
from labcore.sampling_params import BeamSearchParams, SamplingParams


class RequestValidator:
    """Validates requests against the limits of one engine. config: with `max_model_len` resolved."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, pool: BlockPool) -> None:
        self.config = config
        self.loaded = loaded
        self.pool = pool

    def validate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        priority: int,
        arrival_time: float | None,
    ) -> list[int]:
        """The prompt as a list of ints. Raises ValueError, with the field, its value and its range, for a bad request."""
        self.check_name("request_id", request_id)
        if not isinstance(priority, Integral) or isinstance(priority, bool):
            raise ValueError(f"priority is {priority!r}; it must be a whole number (a smaller one goes first).")
        if arrival_time is not None and not (isinstance(arrival_time, Real) and math.isfinite(arrival_time)):
            raise ValueError(f"arrival_time is {arrival_time!r}; it must be a finite number of seconds, or None for now.")
        self._check_params(params)
        prompt = self._check_prompt(prompt_token_ids)
        self._check_room(request_id, len(prompt), params)
        return prompt

    def check_name(self, field: str, name: str) -> None:
        """Raises ValueError unless `name` is a valid request id."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"{field} is {name!r}; it must be a string that is not empty.")

    def check_sharing(self, cache_salt: str, use_prefix_cache: bool) -> None:
        """Raises ValueError for a bad cache_salt or use_prefix_cache."""
        check_text("cache_salt", cache_salt)
        if not isinstance(use_prefix_cache, bool):
            raise ValueError(f"use_prefix_cache is {use_prefix_cache!r}; it must be True or False.")

    def output_limit(self, num_prompt_tokens: int, params: SamplingParams | BeamSearchParams) -> int:
        """Most output tokens of a request: its own max_tokens, or what max_model_len leaves."""
        room = self.config.max_model_len - num_prompt_tokens
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _check_params(self, params: SamplingParams | BeamSearchParams) -> None:
        if isinstance(params, BeamSearchParams):
            if params.beam_width > self.config.max_num_seqs:
                raise ValueError(
                    f"beam_width is {params.beam_width}; it must be from 1 to max_num_seqs, which is "
                    f"{self.config.max_num_seqs}: all beams run side by side."
                )
            return
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; it must be a SamplingParams or a BeamSearchParams.")
        beyond = [token for token in params.stop_token_ids if token >= self.loaded.vocab_size]
        if beyond:
            raise ValueError(f"stop_token_ids has {beyond[0]}; each must be a token id, {self._token_range()}.")
        if params.stop:
            special_stops(params.stop, self.loaded.decoder)  # rejects those that no text can hold

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        if isinstance(prompt_token_ids, (str, bytes, Mapping, Set)) or not isinstance(prompt_token_ids, Iterable):
            raise ValueError(f"prompt is {prompt_token_ids!r}; it must be a list of token ids, {self._token_range()}.")
        prompt, vocab_size = list(prompt_token_ids), self.loaded.vocab_size
        if not prompt:
            raise ValueError("prompt is empty; it must have at least 1 token.")
        for position, token in enumerate(prompt):
            if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ValueError(f"prompt token {position} is {token!r}; it must be a token id, {self._token_range()}.")
        return [int(token) for token in prompt]

    def _check_room(self, request_id: str, num_prompt_tokens: int, params: SamplingParams | BeamSearchParams) -> None:
        longest = self.config.max_model_len
        if num_prompt_tokens >= longest:
            raise ValueError(
                f"prompt has {num_prompt_tokens:,} tokens; this engine can hold at most {longest:,} (max_model_len), one of "
                "them for the answer — shorten it, or pass a larger max_model_len (the model goes up to "
                f"{self.loaded.max_positions:,})."
            )
        limit = self.output_limit(num_prompt_tokens, params)
        needed = self._blocks_needed(num_prompt_tokens, limit, getattr(params, "beam_width", 1))
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"request {request_id!r} needs {needed:,} blocks when finished, the pool has {self.pool.num_blocks:,} — lower "
                f"max_tokens (now {limit:,}) or give the pool more memory (num_blocks, kv_cache_memory_gb)."
            )

    def _blocks_needed(self, num_prompt_tokens: int, limit: int, beam_width: int) -> int:
        """Blocks of one finished sequence, whose last token needs no KV; or of all beams of a search, at their worst.

        Beams share the blocks of their prompt, but beams that are preempted and admitted again in one step each compute
        their own. A search must fit even then, or its beams would wait for a sibling that never fits.
        """
        return beam_width * -(-(num_prompt_tokens + limit - 1) // self.pool.block_size)

    def _token_range(self) -> str:
        return f"0 … {self.loaded.vocab_size - 1:,} for this model"


def check_text(field: str, text: str) -> None:
    """Raises ValueError unless `text` is a string that UTF-8 can encode. Half of a surrogate pair is none."""
    try:
        if isinstance(text, str):
            text.encode("utf-8")
            return
    except UnicodeEncodeError:
        pass
    raise ValueError(f"{field} is {text!r}; it must be text that can be written as UTF-8.")
