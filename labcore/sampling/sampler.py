"""Sampling: logits to tokens, for a whole batch at once.

Logits processors run in vLLM's order; a row skips those that it doesn't use:

    logits ─ mask_eos ─ apply_penalties ─┬─ argmax ────────────────────────────→ greedy token
           (min_tokens)                  └─ apply_temperature ─ apply_min_p ─ apply_top_k
                                            ─ sample_exponential_race (top_p) ─→ sampled token

(transformers applies min_p last: its top_p counts tokens that min_p then drops.)

From the temperature on a row holds *weights*, unnormalised probabilities: 1 for the likeliest token, 0 for a masked
one. Truncation keeps or drops equal weights together, so the result doesn't depend on how a sort orders ties.

Sampling is an exponential race: token i arrives at E_i / w_i with E_i ~ Exp(1), and the first arrival is token i with
probability w_i / Σ w (the Gumbel-max trick without the logarithm). E_i is a hash of (seed, output position, token id):

- no generator state: a preempted request samples the same tokens when it resumes;
- the token doesn't depend on the row, the batch or the device;
- *nearly* equal logits give equal tokens. Changing the batch changes the last bits of a logit, on SmolLM2 in float32 by
  7e-6. At temperature 1 that changes 2 tokens in a million. Inverse-CDF sampling would change 1,800, because an error
  anywhere in the vocabulary shifts all later boundaries: one text of 128 tokens in five would differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from labcore.request import Request

SALT = 0x9E3779B97F4A7C15  # separates the keys of small seeds from those of small token ids
CHUNK = 2**19  # logits processed at once: the temporaries of 10 rows of a 49k vocabulary fit a CPU's cache


@dataclass(frozen=True)
class SampledToken:
    """One row's token. The other fields are None unless the request asked for logprobs.

    logprob    log-probability (natural log) from the raw logits, before penalties, temperature and truncation
    logprobs   {token id: logprob} of the top tokens, best first, ties by id; then the sampled token if not among them
    rank       1 for the token with the largest logit, 2 for the next, …
    """

    token_id: int
    logprob: float | None = None
    logprobs: dict[int, float] | None = None
    rank: int | None = None


Drawn = TypeVar("Drawn")


class SamplingError(RuntimeError):
    """Some rows have no finite largest logit. No row was sampled; retry without the requests in `request_ids`.

    why: the reason, in one sentence
    """

    def __init__(self, request_ids: list[str], why: str) -> None:
        self.request_ids, self.why = request_ids, why
        names = ", ".join(map(repr, request_ids))
        super().__init__(f"no token can be chosen for request {names}: {why}.")


class Sampler:
    """Samples the next token of every request in a batch. Holds no random state."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self._token_keys = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """One token per row.

        logits     [S, V], any float dtype, raw; not modified
        requests   S, in row order; not modified
        Raises SamplingError, and samples nothing, if the largest logit of a row is NaN or infinite.
        """
        if logits.dim() != 2 or len(logits) != len(requests):
            raise ValueError(f"logits have shape {tuple(logits.shape)}; it must be [{len(requests)}, V], one row each.")
        if not requests:
            return []
        best, choice = logits.max(dim=-1)  # the whole cost of a plain greedy row
        check_finite(best, requests)
        token_ids = choice.tolist()
        sampled = [i for i, request in enumerate(requests) if not request.params.is_greedy]
        edited = [i for i, request in enumerate(requests) if request.params.is_greedy and self._is_edited(request)]
        for choose, rows in ((self._sample, sampled), (self._best_allowed, edited)):
            for some in chunks(rows, logits):
                chosen = choose(logits[some].float(), [requests[i] for i in some])  # a copy: list indexing
                for row, token_id in zip(some, chosen.tolist(), strict=True):
                    token_ids[row] = token_id
        return attach_logprobs(logits, token_ids, requests)

    def _is_edited(self, request: Request) -> bool:
        params = request.params
        return params.has_penalties or len(request.output_token_ids) < params.min_tokens

    def _edit(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        logits = mask_eos(logits, requests, self.eos_token_ids)
        logits = apply_penalties(logits, requests)
        check_finite(logits.amax(dim=-1), requests, "min_tokens bans every token that the model allows")
        return logits

    def _best_allowed(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        return self._edit(logits, requests).argmax(dim=-1)

    def _sample(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        logits = self._edit(logits, requests)
        weights = apply_temperature(logits, [request.params.temperature for request in requests])
        weights = apply_min_p(weights, [request.params.min_p for request in requests])
        weights = apply_top_k(weights, [request.params.top_k for request in requests])
        keys = row_keys([request.seed for request in requests], [len(request.output_token_ids) for request in requests])
        noise = exponential_noise(keys.to(weights.device), self._keys_of_tokens(weights))
        return sample_exponential_race(weights, noise, [request.params.top_p for request in requests])

    def _keys_of_tokens(self, weights: Tensor) -> Tensor:
        if len(self._token_keys) != weights.shape[-1] or self._token_keys.device != weights.device:
            self._token_keys = murmur_finalize(torch.arange(1, weights.shape[-1] + 1, device=weights.device))
        return self._token_keys


def draw_sound_rows(
    draw: Callable[[Tensor, Sequence[Request]], list[Drawn]], logits: Tensor, requests: Sequence[Request]
) -> list[Drawn | SamplingError]:
    """What `draw(logits, requests)` gives for each row, [S, V]; for a row that it can't draw from, its SamplingError."""
    results: list[Drawn | SamplingError | None] = [None] * len(requests)
    rows = list(range(len(requests)))
    while rows:
        try:
            drawn = draw(logits, [requests[row] for row in rows])
        except SamplingError as error:
            unsound = set(error.request_ids)
            for row in rows:
                if requests[row].request_id in unsound:
                    results[row] = error
            kept = [i for i, row in enumerate(rows) if results[row] is None]
            if len(kept) == len(rows):  # it names no request of the batch
                raise
            logits, rows = logits[kept], [rows[i] for i in kept]
        else:
            for row, one in zip(rows, drawn, strict=True):
                results[row] = one
            break
    return results


def check_finite(
    best: Tensor,
    requests: Sequence[Request],
    why: str = "its logits hold NaN or infinity, so the model's arithmetic broke down",
) -> None:
    """Raise SamplingError if a row's largest logit, [S], is NaN or infinite."""
    sound = torch.isfinite(best).tolist()
    if not all(sound):
        raise SamplingError([request.request_id for request, ok in zip(requests, sound, strict=True) if not ok], why)


def chunks(rows: list[int], logits: Tensor) -> Iterator[list[int]]:
    """Split rows into chunks whose temporaries fit a CPU's cache; on a GPU one chunk."""
    size = len(rows) if logits.is_cuda else CHUNK // logits.shape[-1]
    size = max(1, size)
    return (rows[i : i + size] for i in range(0, len(rows), size))


def mask_eos(logits: Tensor, requests: Sequence[Request], eos_token_ids: Sequence[int]) -> Tensor:
    """Before min_tokens, set EOS and stop token ids to -inf. In place on [R, V].

    EOS is masked under ignore_eos, too, as in vLLM.
    """
    for row, request in enumerate(requests):
        if len(request.output_token_ids) < request.params.min_tokens:
            stops = [i for i in (*eos_token_ids, *request.params.stop_token_ids) if i < logits.shape[-1]]
            logits[row, stops] = -torch.inf
    return logits


def apply_penalties(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Repetition, frequency and presence penalties, in place on the seen tokens of [R, V].

    repetition            prompt and output tokens: positive logits are divided by it, negative ones multiplied
    frequency, presence   output tokens: minus frequency · count, minus presence once
    Sources: Keskar et al. 2019 (CTRL) for repetition; the OpenAI API for the other two.
    """
    rows, token_ids, counts = [], [], []
    for row, request in enumerate(requests):
        if request.params.has_penalties:
            seen = dict.fromkeys(request.prompt_token_ids, 0) | Counter(request.output_token_ids)
            rows += [row] * len(seen)
            token_ids += seen.keys()
            counts += seen.values()
    if not rows:
        return logits
    at = torch.tensor(rows, device=logits.device), torch.tensor(token_ids, device=logits.device)
    count = torch.tensor(counts, device=logits.device)
    repetition, frequency, presence = torch.tensor(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (r.params for r in requests)],
        device=logits.device,
    )[at[0]].unbind(dim=-1)
    seen_logits = logits[at]
    seen_logits = torch.where(seen_logits > 0, seen_logits / repetition, seen_logits * repetition)
    logits[at] = seen_logits - frequency * count - presence * (count > 0)
    return logits


def apply_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Weights exp((logit - largest logit) / temperature), [R, V], in place: the likeliest token weighs 1.

    Subtracting first keeps the weights finite at any temperature above 0.
    """
    limits = torch.finfo(logits.dtype)
    scale = torch.tensor(temperatures, dtype=torch.float64).clamp(limits.tiny, limits.max)  # neither 0/0 nor inf/inf
    scale = scale.to(logits)[:, None]
    return logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(scale).exp_()


def apply_min_p(weights: Tensor, min_p: Sequence[float]) -> Tensor:
    """Drop tokens below min_p times the likeliest token's weight, which is 1. In place on [R, V].

    Source: Nguyen et al. 2024 (Turning Up the Heat).
    """
    if any(min_p):
        weights.masked_fill_(weights < torch.tensor(min_p).to(weights)[:, None], 0)
    return weights


def apply_top_k(weights: Tensor, top_k: Sequence[int]) -> Tensor:
    """Keep the k heaviest tokens of each row and ties with the k-th; 0 keeps all. In place on [R, V].

    Source: Fan et al. 2018 (Hierarchical Neural Story Generation).
    """
    rows = [row for row, k in enumerate(top_k) if 0 < k < weights.shape[-1]]
    if rows:
        limited = weights[rows]
        k = torch.tensor([top_k[row] for row in rows], device=weights.device)[:, None]
        falling = limited.topk(int(k.max()), dim=-1).values
        weights[rows] = limited.masked_fill_(limited < falling.gather(-1, k - 1), 0)
    return weights


def sample_exponential_race(weights: Tensor, noise: Tensor, top_p: Sequence[float]) -> Tensor:
    """Sample one token per row, [R] int64, from its nucleus (top_p). May modify weights, [R, V].

    noise   [R, V], independent samples of Exp(1); token i arrives at noise[i] / weights[i], never if its weight is 0
    top_p   the nucleus is the smallest set of heaviest tokens with this share of the row's weight, and ties with the
            last of them; 1 is the whole row
    No sort. A token is in the nucleus if the tokens heavier than it hold less than the share, which takes one sum. If
    the first arrival is outside, so is every lighter token: all of them are rejected and the race is run among the
    rest. Most rows take one round, a flat one a handful.
    Sources: Holtzman et al. 2020 (nucleus sampling); FlashInfer 2025 (sorting-free rejection sampling).
    """
    token_ids = (noise / weights).argmin(dim=-1)
    rows = torch.tensor([row for row, p in enumerate(top_p) if p < 1], dtype=torch.int64, device=weights.device)
    share = torch.tensor(top_p, dtype=torch.float64, device=weights.device)
    enough = share[rows] * weights[rows].sum(dim=-1, dtype=torch.float64)
    while len(rows):
        candidates = weights[rows]
        heavier = candidates * (candidates > candidates.gather(-1, token_ids[rows, None]))
        outside = heavier.sum(dim=-1, dtype=torch.float64) >= enough
        rows, enough, heavier = rows[outside], enough[outside], heavier[outside]
        weights[rows] = heavier
        token_ids[rows] = (noise[rows] / heavier).argmin(dim=-1)
    return token_ids


def exponential_noise(row_keys: Tensor, token_keys: Tensor) -> Tensor:
    """Samples of Exp(1), [R, V] float32, determined by row_keys [R] and token_keys [V], both int64."""
    bits = murmur_finalize(token_keys ^ row_keys[:, None])
    uniform = bits.float().abs_().mul_(2.0**-63)
    uniform.clamp_(2.0**-64, 1 - 2.0**-24)  # noise is neither 0 nor infinite: 0 / 0 and inf / inf have no order
    return uniform.neg_().log1p_().neg_()


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """A 64-bit hash of each (seed, output position), [R] int64; neighbouring inputs give unrelated keys."""
    signed = [((seed ^ SALT) + 2**63) % 2**64 - 2**63 for seed in seeds]
    return murmur_finalize(murmur_finalize(torch.tensor(signed)) + torch.tensor(positions))


def murmur_finalize(bits: Tensor) -> Tensor:
    """A bijective hash of int64s: changing one input bit flips about half of the output's upper bits.

    Source: MurmurHash3's 64-bit finalizer (Appleby) without its last xor-shift, which mixes the lower bits only.
    """
    low = 2**31 - 1  # the hash needs a logical shift, torch's is arithmetic
    bits = bits ^ (bits >> 33).bitwise_and_(low)
    bits.mul_(-49064778989728563)  # 0xFF51AFD7ED558CCD as a signed number; products wrap around
    bits.bitwise_xor_((bits >> 33).bitwise_and_(low))
    return bits.mul_(-4265267296055464877)  # 0xC4CEB9FE1A85EC53


def attach_logprobs(logits: Tensor, token_ids: list[int], requests: Sequence[Request]) -> list[SampledToken]:
    """The sampled tokens, with logprobs for the requests that ask for them; logits [S, V], raw."""
    tokens = [SampledToken(token_id) for token_id in token_ids]
    asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if not asked:
        return tokens
    raw = logits[asked].float()
    chosen = torch.tensor([token_ids[i] for i in asked], device=raw.device)[:, None]
    own = raw.gather(-1, chosen)
    ids = torch.arange(raw.shape[-1], device=raw.device)
    ranks = 1 + ((raw > own) | ((raw == own) & (ids < chosen))).sum(dim=-1)
    totals = raw.logsumexp(dim=-1, keepdim=True)
    tops = top_tokens(raw, max(requests[i].params.logprobs for i in asked))
    for row, (i, total, logit, rank) in enumerate(
        zip(asked, totals[:, 0].tolist(), own[:, 0].tolist(), ranks.tolist(), strict=True)
    ):
        logprobs = {token_id: value - total for token_id, value in tops[row][: requests[i].params.logprobs]}
        logprobs.setdefault(token_ids[i], logit - total)
        tokens[i] = SampledToken(token_ids[i], logit - total, logprobs, rank)
    return tokens


def top_tokens(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """(token id, logit) of each row's top `count` tokens and ties with the last, best first, ties by id; logits [R, V].

    Which of several equal logits topk returns is unspecified, so all that reach its smallest value are sorted.
    """
    least = logits.topk(min(max(count, 1), logits.shape[-1]), dim=-1).values[:, -1:]
    rows, ids = (logits >= least).nonzero(as_tuple=True)
    tops: list[list[tuple[int, float]]] = [[] for _ in range(len(logits))]
    for row, token_id, logit in zip(rows.tolist(), ids.tolist(), logits[rows, ids].tolist(), strict=True):
        tops[row].append((token_id, logit))
    return [sorted(top, key=lambda entry: -entry[1]) for top in tops]
