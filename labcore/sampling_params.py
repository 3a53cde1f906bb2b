"""Sampling parameters of one request: how tokens are sampled, when generation stops, what is returned.

Names, defaults and meanings are vLLM's. Values are validated here, once, before a request is queued; a value out of range
is rejected, never clamped. numpy numbers are converted to Python's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import ClassVar

MAX_N = 4096
"""Most sequences of one prompt. Each is a request of its own, so a mistyped n could exhaust memory."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. A bad value raises `ValueError` that names the field, the value and the range.

    n                    sequences sampled from the prompt independently, up to 4,096; above 1 needs temperature > 0
    temperature          divides the logits; 0 is greedy
    top_p                sample from the smallest set of tokens whose probabilities sum to this, above 0 and up to 1 (off)
    top_k                sample from the k most probable tokens; 0 is off, and so is -1, which is stored as 0
    min_p                drop tokens below this share of the most probable token's probability, 0 (off) to 1
    seed                 the same seed gives the same text, whatever else is in the batch; None takes the engine's
    max_tokens           most output tokens; None allows as many as fit into max_model_len
    min_tokens           output tokens before an end token, a stop id or a stop string may end the request
    stop                 strings that end the text and are cut off. The name of a special token, which decodes to no
                         text, ends it at that token. Stored as a tuple
    stop_token_ids       token ids that end the request, in addition to the model's end tokens. Stored as a tuple
    ignore_eos           continue after the model's end token
    logprobs             None, or how many of the most probable tokens to report with their log-probabilities at each
                         position; the sampled token is always included, so 0 reports it alone
    presence_penalty     subtracted from the logit of each token that the output contains, -2 to 2
    frequency_penalty    subtracted from the logit of a token once for each time that the output contains it, -2 to 2
    repetition_penalty   divides positive and multiplies negative logits of all tokens of prompt and output, 0.01 to 100;
                         1 is off
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    is_search: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checked = {
            "n": _whole("n", self.n, 1, MAX_N),
            "temperature": _number("temperature", self.temperature, 0, math.inf, ", 0 (greedy) or more, and finite"),
            "top_p": _number("top_p", self.top_p, 0, 1, " above 0 and up to 1", open_below=True),
            "top_k": max(0, _whole("top_k", self.top_k, -1, says=", at least 1, or 0 or -1 for no limit")),
            "min_p": _number("min_p", self.min_p, 0, 1),
            "seed": _whole("seed", self.seed, 0, 2**63 - 1, optional=True),
            "max_tokens": _whole("max_tokens", self.max_tokens, 1, optional=True),
            "min_tokens": _whole("min_tokens", self.min_tokens, 0),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "logprobs": _whole("logprobs", self.logprobs, 0, optional=True),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2, 2),
            # The bounds keep penalised logits finite.
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100),
        }
        _store(self, checked)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _reject("min_tokens", self.min_tokens, f"a whole number from 0 to max_tokens, which is {self.max_tokens:,}")
        if self.n > 1 and self.is_greedy:
            # n equal texts at n times the cost; vLLM rejects it too.
            _reject("n", self.n, "1 when temperature is 0: greedy continuations of one prompt are all the same")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search of one prompt. A bad value raises `ValueError` that names the field, the value and the range.

    beam_width       beams kept after each step, and sequences returned
    max_tokens       most output tokens of each sequence
    length_penalty   a finished sequence scores its summed log-probability / length ** length_penalty, -10 to 10
    ignore_eos       continue sequences after the model's end token
    temperature      always 0: beams are ranked by the model's probabilities, not sampled
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    ignore_eos: bool = False
    temperature: float = 0.0

    is_search: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked = {
            "beam_width": _whole("beam_width", self.beam_width, 1),
            "max_tokens": _whole("max_tokens", self.max_tokens, 1),
            "length_penalty": _number("length_penalty", self.length_penalty, -10, 10),  # length ** it stays finite
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "temperature": _number("temperature", self.temperature, 0, 0, ", always 0: beam search samples nothing"),
        }
        _store(self, checked)


def _store(params: SamplingParams | BeamSearchParams, checked: dict[str, object]) -> None:
    for field in fields(params):
        object.__setattr__(params, field.name, checked[field.name])  # the dataclass is frozen


def _reject(name: str, value: object, allowed: str) -> None:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:80] + "…"
    raise ValueError(f"{name} is {shown}; it must be {allowed}.")


def _whole(
    name: str, value: object, low: int, high: float = math.inf, says: str = "", optional: bool = False
) -> int | None:
    if value is None and optional:
        return None
    # bool is a subclass of int; n=True is rejected.
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
        says = says or (f", at least {low:,}" if high == math.inf else f" from {low:,} to {high:,}")
        _reject(name, value, f"a whole number{says}" + (", or None" if optional else ""))
    return int(value)


def _number(name: str, value: object, low: float, high: float, says: str = "", open_below: bool = False) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an int may be larger than any float
            number = math.inf
    if not low <= number <= high or math.isinf(number) or (open_below and number == low):  # NaN fails the first
        _reject(name, value, f"a number{says or f' from {low:g} to {high:g}'}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _reject(name, value, "True or False")
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not _is_list(strings) or not all(isinstance(string, str) and string for string in strings):
        _reject("stop", value, "a string that is not empty, a list of such strings, or None")
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    ids = () if value is None else value
    if not _is_list(ids) or not all(isinstance(i, Integral) and not isinstance(i, bool) and i >= 0 for i in ids):
        _reject(name, value, "a list of token ids (whole numbers from 0), or None")
    return tuple(int(token_id) for token_id in ids)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
