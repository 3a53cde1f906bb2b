"""Logits to tokens: every option against a plain float64 reference, alone, combined and in mixed batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labcore.request import Request
from labcore.sampling.sampler import (
    CHUNK,
    Sampler,
    SamplingError,
    apply_min_p,
    apply_penalties,
    apply_temperature,
    apply_top_k,
    draw_sound_rows,
    exponential_noise,
    murmur_finalize,
    row_keys,
    sample_exponential_race,
)
from labcore.sampling_params import SamplingParams

VOCAB = 12
EOS = 2


def request(params: SamplingParams, seed: int = 0, prompt=(1,), output=(), name: str = "r") -> Request:
    return Request(name, list(prompt), params, 0, 64, seed, output_token_ids=list(output))


def params(**kw) -> SamplingParams:
    return SamplingParams(max_tokens=None, **kw)


def reference(logits, params: SamplingParams, prompt=(1,), output=()) -> np.ndarray:
    """Probability of each token, float64, the plain way: one row, full sort, in vLLM's order of operations."""
    logits = np.array(logits, dtype=np.float64)
    if len(output) < params.min_tokens:
        logits[[EOS, *params.stop_token_ids]] = -np.inf
    for token in {*prompt, *output}:
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.is_greedy:
        return np.eye(len(logits))[logits.argmax()]
    p = softmax(logits / params.temperature)
    p = np.where(p >= params.min_p * p.max(), p, 0)
    p /= p.sum()
    if 0 < params.top_k < len(p):
        p = np.where(p >= np.sort(p)[-params.top_k], p, 0)
        p /= p.sum()
    if params.top_p < 1:
        heavier = np.array([p[p > own].sum() for own in p])
        p = np.where(heavier < params.top_p, p, 0)
    return p / p.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def sample(logits, params: SamplingParams, count: int, prompt=(1,), output=()) -> np.ndarray:
    """`count` tokens from the same logits, one a seed, all in one batch."""
    requests = [request(params, seed, prompt, output) for seed in range(count)]
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    return np.array([token.token_id for token in Sampler([EOS])(rows, requests)])


def chi_square(tokens: np.ndarray, p: np.ndarray) -> float:
    """How far the counts are from p, in standard deviations of the statistic; rare tokens are pooled."""
    counts = np.bincount(tokens, minlength=len(p)).astype(float)
    expected = p * len(tokens)
    rare = expected < 10
    observed, wanted = counts[~rare], expected[~rare]
    if expected[rare].sum() > 0:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


LOGITS = np.random.default_rng(0).normal(0, 1.5, VOCAB).round(3)
HISTORY = {"prompt": (1, 3, 3, 7), "output": (4, 4, 7)}
OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_p": 0.1},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"min_tokens": 9, "stop_token_ids": [5]},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.15},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"top_k": 5, "min_p": 0.3, "frequency_penalty": 1.0, "min_tokens": 4},
]


class TestDistribution:
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_draws_follow_the_reference_and_stay_in_its_support(self, options):
        p = reference(LOGITS, params(**options), **HISTORY)
        tokens = sample(LOGITS, params(**options), 8_000, **HISTORY)
        assert chi_square(tokens, p) < 4
        assert set(tokens) == set(np.flatnonzero(p > 1e-3)) | (set(tokens) & set(np.flatnonzero(p)))

    def test_the_check_notices_a_temperature_that_is_off_by_a_tenth(self):
        assert chi_square(sample(LOGITS, params(), 20_000), reference(LOGITS, params(temperature=1.1))) > 10

    def test_the_draws_of_one_request_follow_it_too_over_the_positions_of_its_output(self):
        requests = [request(params(), seed=0, output=[0] * n) for n in range(4000)]
        tokens = Sampler([EOS])(torch.tensor(LOGITS, dtype=torch.float32).expand(4000, -1), requests)
        assert chi_square(np.array([t.token_id for t in tokens]), reference(LOGITS, params())) < 4

    def test_successive_draws_and_neighbouring_seeds_are_independent(self):
        first, second = (sample([0.0] * 4, params(), 3000, output=[0] * position) for position in (0, 1))
        pairs_in_time, pairs_of_seeds = first * 4 + second, first[:-1] * 4 + first[1:]
        assert chi_square(pairs_in_time, np.full(16, 1 / 16)) < 4
        assert chi_square(pairs_of_seeds, np.full(16, 1 / 16)) < 4

    @given(
        logits=st.lists(st.integers(-6, 6), min_size=2, max_size=10),
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_k=st.integers(0, 11),
        top_p=st.floats(0.05, 1),
        min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    )
    @settings(max_examples=200, deadline=None)
    def test_the_support_is_exact_ties_included(self, logits, temperature, top_k, top_p, min_p):
        chosen = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        weights = apply_temperature(torch.tensor([logits], dtype=torch.float32), [temperature])
        weights = apply_top_k(apply_min_p(weights, [min_p]), [top_k])
        # Let each token in turn be the only one that could come first: it is drawn if and only if it is in.
        noise = torch.where(torch.eye(len(logits)) == 1, 1e-9, 1e9)
        drawn = sample_exponential_race(weights.repeat(len(logits), 1), noise, [top_p] * len(logits))
        support = {i for i, token in enumerate(drawn.tolist()) if i == token}
        # A token right on the border of top_p may fall either way, by rounding.
        surely, maybe = (
            set(np.flatnonzero(reference(logits, replace(chosen, top_p=min(1.0, top_p * about)))))
            for about in (1 - 1e-5, 1 + 1e-5)
        )
        assert surely <= support <= maybe

    def test_equal_logits_stay_or_go_together(self):
        logits = [3.0, 1.0, 3.0, 1.0, 0.0]
        assert set(sample(logits, params(top_k=1), 200)) == {0, 2}
        assert set(sample(logits, params(top_k=3), 2000)) == {0, 1, 2, 3}
        assert set(sample(logits, params(top_p=0.3), 200)) == {0, 2}
        assert set(sample(logits, params(min_p=0.5), 200)) == {0, 2}
        assert set(sample([0.0] * 4, params(top_p=0.01), 400)) == {0, 1, 2, 3}

    def test_top_p_is_a_share_of_what_min_p_and_top_k_left(self):
        logits = np.log([0.4, 0.3, 0.2, 0.1])
        assert set(sample(logits, params(top_p=0.55), 500)) == {0, 1}
        assert set(sample(logits, params(top_p=0.55, top_k=2), 500)) == {0}  # 0.4 of the 0.7 that is left is 57 %
        assert set(sample(logits, params(top_p=0.55, min_p=0.7), 500)) == {0}

    def test_top_k_larger_than_the_vocabulary_changes_nothing(self):
        assert (sample(LOGITS, params(top_k=10**9), 500) == sample(LOGITS, params(), 500)).all()
        assert (sample(LOGITS, params(top_k=VOCAB), 500) == sample(LOGITS, params(), 500)).all()

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-4])
    def test_a_tiny_temperature_is_greedy_without_overflow(self, temperature):
        assert set(sample([1.0, 5.0, -math.inf, 4.99], params(temperature=temperature), 100)) == {1}

    @pytest.mark.parametrize("temperature", [1e30, 1.7e308])
    def test_a_huge_temperature_is_uniform_over_what_is_allowed(self, temperature):
        tokens = sample([1.0, 5.0, -math.inf, -80.0], params(temperature=temperature), 3000)
        assert chi_square(tokens, np.array([1, 1, 0, 1]) / 3) < 4 and 2 not in tokens

    def test_a_flat_vocabulary_of_real_size_is_drawn_from_its_nucleus(self):
        vocab, count = 49_152, 400
        logits = torch.linspace(0, 1, vocab)
        requests = [request(params(top_p=0.5), seed) for seed in range(count)]
        tokens = np.array([token.token_id for token in Sampler([])(logits.expand(count, -1), requests)])
        p = torch.softmax(logits.double(), 0).numpy()
        heavier = p.sum() - p.cumsum()
        p = np.where(heavier < 0.5, p, 0)
        bins = np.arange(vocab) * 16 // vocab
        assert tokens.min() >= np.flatnonzero(p).min() - 1  # a token right on the border may fall either way
        assert chi_square(bins[tokens], np.bincount(bins, p / p.sum())) < 4


class TestNoise:
    def test_it_is_exponential(self):
        noise = exponential_noise(row_keys(range(64), [0] * 64), murmur_finalize(torch.arange(1, 4097))).double()
        assert torch.isfinite(noise).all() and (noise > 0).all()
        uniform = torch.exp(-noise).flatten().sort().values
        gap = (uniform - torch.linspace(0, 1, len(uniform), dtype=torch.float64)).abs().max()
        assert float(gap) * math.sqrt(len(uniform)) < 1.95  # Kolmogorov-Smirnov, 0.1 %

    @pytest.mark.parametrize("keys", [row_keys(range(2000), [0] * 2000), row_keys([7] * 2000, range(2000))])
    def test_tokens_and_neighbouring_keys_are_uncorrelated(self, keys):
        noise = exponential_noise(keys, murmur_finalize(torch.arange(1, 257))).double() - 1
        for matrix, count in ((noise.T @ noise / 2000, 2000), (noise @ noise.T / 256, 256)):
            off_diagonal = matrix - torch.diag(torch.diag(matrix))
            assert float(off_diagonal.square().mean()) * count == pytest.approx(1, abs=0.1)

    def test_small_seeds_positions_and_token_ids_favour_nobody(self):
        """Row and token keys come from the same hash; if two of them meet, that token wins whatever it weighs."""
        for seed in range(8):
            noise = exponential_noise(row_keys([seed] * 64, range(64)), murmur_finalize(torch.arange(1, 4097)))
            assert 1e-9 < float(noise.min()) < 1e-3

    def test_every_seed_has_a_key_of_its_own(self):
        seeds = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
        assert len(set(row_keys(seeds, [0] * len(seeds)).tolist())) == len(seeds)
        assert row_keys([2**64 + 5], [3]).tolist() == row_keys([5], [3]).tolist()

    def test_mixing_maps_no_two_numbers_to_one(self):
        numbers = torch.cat([torch.arange(-50_000, 50_000), torch.arange(1000) << 50])
        assert len(murmur_finalize(numbers).unique()) == len(numbers.unique())

    def test_it_is_the_same_everywhere_and_for_good(self):
        assert row_keys([0, 42], [0, 7]).tolist() == KEYS
        tokens = sample(LOGITS, params(), 12).tolist()
        assert tokens == TOKENS


KEYS = [456416267117119946, 6000913988309637217]
TOKENS = [2, 3, 7, 3, 5, 6, 5, 7, 6, 6, 3, 7]

any_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 30, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.2, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    min_tokens=st.sampled_from([0, 0, 4]),
    stop_token_ids=st.sampled_from([(), (5,), (5, 999)]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
)
token_lists = st.lists(st.integers(0, 39), max_size=8)
requests_of_a_batch = st.lists(
    st.builds(request, any_params, st.integers(0, 2**63 - 1), token_lists, token_lists), min_size=1, max_size=8
)


class TestMixedBatches:
    @given(requests_of_a_batch, st.integers(0, 1000), st.randoms(use_true_random=False))
    @settings(max_examples=75, deadline=None)
    def test_every_row_gets_what_it_gets_alone_in_whatever_order(self, requests, noise_seed, random):
        logits = torch.randn(len(requests), 40, generator=torch.Generator().manual_seed(noise_seed)) * 3
        sampler = Sampler([EOS])
        alone = [sampler(logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]
        assert sampler(logits, requests) == alone
        order = random.sample(range(len(requests)), len(requests))
        assert sampler(logits[order], [requests[i] for i in order]) == [alone[i] for i in order]

    def test_rows_of_several_chunks_get_what_they_get_alone(self):
        vocab = CHUNK // 3
        options = [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0, "repetition_penalty": 2.0}]
        requests = [request(params(**options[i % 5]), seed=i) for i in range(17)]
        logits = torch.randn(17, vocab, generator=torch.Generator().manual_seed(1)) * 4
        sampler = Sampler([EOS])
        assert sampler(logits, requests) == [sampler(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]

    def test_placeholders_of_greedy_rows_do_no_harm_beside_banned_tokens(self):
        """A greedy row with banned tokens, two kinds of sampled rows and one with all but one token banned (c75)."""
        generator = torch.Generator().manual_seed(0)
        kinds = [
            (params(temperature=0), [1, 2, 3]),
            (params(temperature=0.8, top_p=0.9), []),
            (params(temperature=0), []),
            (params(temperature=1), [i for i in range(20) if i != 6]),
        ]
        sampler = Sampler([EOS])
        for step in range(200):
            order = torch.randperm(4, generator=generator).tolist()
            logits = torch.randn(4, 20, generator=generator)
            for row, kind in enumerate(order):
                logits[row, kinds[kind][1]] = -math.inf
            requests = [request(kinds[kind][0], seed=kind, output=[0] * step) for kind in order]
            tokens = [token.token_id for token in sampler(logits, requests)]
            for row, kind in enumerate(order):
                assert tokens[row] not in kinds[kind][1]
                assert tokens[row] == sampler(logits[row : row + 1], [requests[row]])[0].token_id
                if kinds[kind][0].is_greedy:
                    assert tokens[row] == int(logits[row].argmax())
            assert tokens[order.index(3)] == 6

    def test_a_request_that_comes_back_draws_what_it_would_have_drawn(self):
        logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(3))
        steady = request(params(), seed=9)
        for row in logits:
            steady.output_token_ids.append(Sampler([EOS])(row[None], [steady])[0].token_id)
        halves = request(params(), seed=9)
        for step, row in enumerate(logits):
            if step == 11:  # preempted: nothing survives but its tokens
                halves = request(params(), seed=9, output=halves.output_token_ids)
            crowd = [request(params(), seed=s) for s in range(step % 3)]
            batch = torch.cat([torch.zeros(len(crowd), VOCAB), row[None]])
            halves.output_token_ids.append(Sampler([EOS])(batch, [*crowd, halves])[-1].token_id)
        assert halves.output_token_ids == steady.output_token_ids

    def test_logits_that_nearly_agree_give_the_same_tokens(self):
        """So differ a row's logits in a batch and alone, here magnified a hundred times to have something to count."""
        generator = torch.Generator().manual_seed(0)
        hidden, head = (torch.randn(*shape, generator=generator) for shape in ((200, 16), (16, 5000)))
        logits = hidden @ head / 2
        nudged = (hidden + 5e-4 * torch.randn(200, 16, generator=generator)) @ head / 2
        changed = changed_by_lookup = 0
        for position in range(10):
            requests = [request(params(), seed, output=[0] * position) for seed in range(200)]
            pairs = zip(Sampler([])(logits, requests), Sampler([])(nudged, requests), strict=True)
            changed += sum(a.token_id != b.token_id for a, b in pairs)
            u = torch.rand(200, 1, dtype=torch.float64, generator=generator)
            a, b = (torch.searchsorted(x.double().softmax(-1).cumsum(-1), u) for x in (logits, nudged))
            changed_by_lookup += int((a != b).sum())
        assert changed <= 5  # of 2,000
        assert changed_by_lookup > 100  # the obvious way to draw, for comparison

    def test_top_p_on_logits_that_differ_in_their_last_bits_gives_the_same_tokens(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(1000, 5000, generator=generator) * 2
        nudged = logits + torch.randn(1000, 5000, generator=generator) * 1e-5
        requests = [request(params(top_p=0.9, temperature=0.8), seed) for seed in range(1000)]
        pairs = zip(Sampler([])(logits, requests), Sampler([])(nudged, requests), strict=True)
        assert sum(a.token_id != b.token_id for a, b in pairs) <= 1


class TestPenalties:
    """Prompt holds token 7 five times (c78)."""

    prompt = (7, 7, 7, 7, 7, 3)
    logits = torch.tensor([[0.5, -1.0, 0.25, 2.0, -0.5, 1.5, 0.0, 3.0]])

    def processed(self, output, **options) -> torch.Tensor:
        return apply_penalties(self.logits.clone(), [request(params(**options), prompt=self.prompt, output=output)])[0]

    def test_presence_and_frequency_ignore_the_prompt(self):
        for output in [(), (7,), (7, 0), (7, 0, 7), (7, 0, 7, 7, 1)]:
            got = self.processed(output, presence_penalty=2.0, frequency_penalty=1.0)
            for token in range(8):
                count = output.count(token)
                expected = float(self.logits[0, token]) - (2.0 + count if count else 0)
                assert float(got[token]) == pytest.approx(expected)

    def test_repetition_counts_prompt_and_output_from_the_first_step(self):
        for output in [(), (4,), (4, 1), (4, 1, 4), (4, 1, 4, 7)]:
            got = self.processed(output, repetition_penalty=1.3)
            for token, logit in enumerate(self.logits[0].tolist()):
                seen = token in self.prompt + output
                expected = (logit / 1.3 if logit > 0 else logit * 1.3) if seen else logit
                assert float(got[token]) == pytest.approx(expected)

    def test_repetition_comes_before_the_subtractions(self):
        got = self.processed((7,), repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
        assert float(got[7]) == pytest.approx(3.0 / 2.0 - 1.5)

    def test_a_banned_token_stays_banned(self):
        logits = torch.full((1, 4), -math.inf)
        logits[0, 1] = 0.0
        got = apply_penalties(logits, [request(params(repetition_penalty=0.5, presence_penalty=-2.0), output=(0, 3))])
        assert got[0, [0, 3]].tolist() == [-math.inf, -math.inf]

    def test_only_the_rows_that_ask_are_touched(self):
        logits = self.logits.repeat(3, 1)
        requests = [
            request(params(), output=(3,)),
            request(params(presence_penalty=1.0), output=(3,)),
            request(params()),
        ]
        got = apply_penalties(logits.clone(), requests)
        assert torch.equal(got[[0, 2]], logits[[0, 2]]) and float(got[1, 3]) == 1.0

    def test_greedy_rows_feel_them(self):
        token = Sampler([])(self.logits, [request(params(temperature=0, presence_penalty=1.2), output=(7,))])[0]
        assert token.token_id == 3


class TestMinTokens:
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0, 8.0, 3.0]])

    def token(self, output, **options) -> int:
        chosen = params(temperature=0, stop_token_ids=[4], **options)
        return Sampler([EOS])(self.logits, [request(chosen, output=output)])[0].token_id

    def test_end_tokens_and_stop_ids_are_out_until_it_is_reached(self):
        assert self.token([0], min_tokens=2) == 5
        assert self.token([0, 0], min_tokens=2) == 2

    def test_the_models_end_token_is_out_under_ignore_eos_too(self):
        assert self.token([], min_tokens=1, ignore_eos=True) == 5

    def test_without_it_nothing_is_out(self):
        assert self.token([]) == 2

    def test_ids_beyond_the_vocabulary_do_no_harm(self):
        chosen = params(temperature=0, stop_token_ids=[2, 10**9], min_tokens=1)
        assert Sampler([10**6])(self.logits, [request(chosen)])[0].token_id == 4

    def test_a_ban_of_everything_is_an_error_that_names_the_request(self):
        chosen = params(stop_token_ids=range(6), min_tokens=1)
        with pytest.raises(SamplingError, match="request 'b': min_tokens bans every token"):
            Sampler([])(self.logits.repeat(2, 1), [request(params(), name="a"), request(chosen, name="b")])


class LargeOperations(TorchDispatchMode):
    """Notes the names of operations that read or write a tensor of at least `size` elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        if any(x.numel() >= self.size for x in tensors):
            self.names.append(func.overloadpacket.__name__)
        return result


class TestGreedy:
    def test_the_first_of_equal_logits_is_taken(self):
        tokens = Sampler([])(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]]), [request(params(temperature=0))] * 2)
        assert [token.token_id for token in tokens] == [1, 0]

    def test_a_greedy_batch_takes_one_maximum_and_nothing_else_of_its_size(self):
        logits = torch.randn(8, 3000)
        with LargeOperations(size=3000) as large:
            Sampler([])(logits, [request(params(temperature=0, top_k=5, top_p=0.5))] * 8)
        assert large.names == ["max"]

    def test_a_sampled_row_in_a_greedy_batch_costs_one_row(self):
        requests = [request(params(temperature=int(i == 3), top_p=0.5), seed=i) for i in range(8)]
        logits = torch.randn(8, 3000)
        with LargeOperations(size=2 * 3000) as large:
            Sampler([])(logits, requests)
        assert set(large.names) == {"max", "index"}  # one maximum, and one look at the row

    def test_half_precision_logits_are_taken_as_they_come(self):
        for dtype in (torch.float16, torch.bfloat16):
            logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
            requests = [request(params(temperature=i % 2, logprobs=2), seed=i) for i in range(6)]
            assert Sampler([])(logits, requests) == Sampler([])(logits.float(), requests)


class TestLogprobs:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.5, 2.5, -4.0]])
    expected = torch.log_softmax(logits[0].double(), 0).tolist()

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 1.0},
            {"temperature": 0.2},
            {"temperature": 0.2, "top_p": 0.5},
            {"presence_penalty": 2.0},
            {"temperature": 0.0},
        ],
        ids=str,
    )
    def test_they_are_the_models_own_whatever_the_settings(self, options):
        """Log-softmax of the raw logits; the chosen token is always there, ranks count from 1 (c82)."""
        ranked = sorted(range(7), key=lambda token: -self.logits[0, token].item())
        chosen_outside = 0
        for seed in range(60):
            token = Sampler([])(self.logits, [request(params(logprobs=3, **options), seed, output=(1,))])[0]
            assert token.logprob == pytest.approx(self.expected[token.token_id], abs=1e-5)
            assert token.rank == ranked.index(token.token_id) + 1
            assert list(token.logprobs)[:3] == [1, 5, 2]
            assert len(token.logprobs) == 3 + (token.token_id not in (1, 5, 2))
            assert token.logprobs == pytest.approx({i: self.expected[i] for i in token.logprobs}, abs=1e-5)
            assert token.token_id in token.logprobs
            chosen_outside += token.token_id not in (1, 5, 2)
        assert chosen_outside > 0 or options != {"temperature": 1.0}

    def test_a_token_outside_the_top_list_is_the_fourth_entry(self):
        chosen = params(temperature=0, logprobs=3, presence_penalty=2.0, frequency_penalty=2.0)
        token = Sampler([])(self.logits, [request(chosen, output=(1, 5, 2))])[0]
        assert token.token_id == 0 and token.rank == 4
        assert list(token.logprobs) == [1, 5, 2, 0]

    def test_zero_reports_the_chosen_token_alone(self):
        token = Sampler([])(self.logits, [request(params(temperature=0, logprobs=0))])[0]
        assert token.logprobs == {1: token.logprob}

    def test_requests_that_do_not_ask_get_none(self):
        asks, silent = Sampler([])(self.logits.repeat(2, 1), [request(params(logprobs=1)), request(params())])
        assert asks.logprob is not None
        assert (silent.logprob, silent.logprobs, silent.rank) == (None, None, None)

    def test_equal_logits_are_listed_by_id(self):
        logits = torch.zeros(1, 5000)
        logits[0, 4000] = 1.0
        token = Sampler([])(logits, [request(params(temperature=0, logprobs=4))])[0]
        assert list(token.logprobs) == [4000, 0, 1, 2]
        later = Sampler([])(torch.zeros(1, 50), [request(params(logprobs=2), seed=1)])[0]
        assert later.rank == later.token_id + 1

    def test_more_than_the_vocabulary_is_all_of_it(self):
        token = Sampler([])(self.logits, [request(params(logprobs=100))])[0]
        assert len(token.logprobs) == 7

    def test_a_token_that_the_model_rules_out_has_minus_infinity(self):
        token = Sampler([])(torch.tensor([[0.0, -math.inf, 0.0]]), [request(params(logprobs=3))])[0]
        assert token.logprobs[1] == -math.inf and token.logprob == pytest.approx(math.log(0.5))


class TestFaults:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_broken_logits_are_an_error_that_names_the_requests(self, bad, temperature):
        logits = torch.randn(4, 9)
        logits[1, 3] = logits[3, 0] = bad
        requests = [request(params(temperature=temperature), name=name) for name in "abcd"]
        with pytest.raises(SamplingError, match=r"request 'b', 'd': its logits hold NaN or infinity") as caught:
            Sampler([])(logits, requests)
        assert caught.value.request_ids == ["b", "d"]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_broken_rows_get_their_error_and_the_others_their_token(self, temperature):
        """Rows 1 and 3 are broken, row 4 is banned from everything: two reasons, found one after the other."""
        logits = torch.randn(6, 9)
        logits[1, 3] = logits[3, 0] = math.nan
        wanted = params(temperature=temperature, seed=1)
        requests = [request(wanted, name=name) for name in "abcdef"]
        requests[4] = request(params(temperature=temperature, min_tokens=1, stop_token_ids=list(range(9))), name="e")
        results = draw_sound_rows(Sampler([]), logits, requests)
        whys = {row: result.why for row, result in enumerate(results) if isinstance(result, SamplingError)}
        assert {row: why.split()[0] for row, why in whys.items()} == {1: "its", 3: "its", 4: "min_tokens"}
        for row in (0, 2, 5):
            assert results[row] == Sampler([])(logits[row : row + 1], [requests[row]])[0]

    def test_an_error_that_names_no_row_of_the_batch_is_not_asked_again(self):
        def draw(logits, requests):
            raise SamplingError(["another"], "no reason")

        with pytest.raises(SamplingError, match="another"):
            draw_sound_rows(draw, torch.zeros(1, 9), [request(params())])

    @pytest.mark.parametrize("place", [0, 4, 8])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("options", [
        {"temperature": 0}, {"temperature": 1}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"presence_penalty": 1.0},
        {"temperature": 0, "logprobs": 2},
    ], ids=str)  # fmt: skip
    def test_a_nan_is_noticed_wherever_it_stands_and_whatever_is_asked(self, place, dtype, options):
        """Case: reductions treated NaN differently by its place and by where they ran. It must never become token 0."""
        logits = torch.full((3, 9), -1.0, dtype=dtype)
        logits[1, place] = math.nan
        requests = [request(params(**options), name=name, output=(2,)) for name in "abc"]
        with pytest.raises(SamplingError) as caught:
            Sampler([])(logits, requests)
        assert caught.value.request_ids == ["b"]
        assert len(Sampler([])(logits[[0, 2]], [requests[0], requests[2]])) == 2

    def test_a_row_of_minus_infinity_has_no_token_either(self):
        with pytest.raises(SamplingError, match="'r'"):
            Sampler([])(torch.full((1, 5), -math.inf), [request(params())])

    def test_after_a_fault_the_other_requests_get_their_tokens(self):
        logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
        requests = [request(params(), seed=i, name=str(i)) for i in range(3)]
        sampler = Sampler([])
        expected = sampler(logits, requests)
        broken = logits.clone()
        broken[1] = math.nan
        with pytest.raises(SamplingError):
            sampler(broken, requests)
        assert sampler(logits[[0, 2]], [requests[0], requests[2]]) == [expected[0], expected[2]]

    def test_logits_and_requests_must_match(self):
        with pytest.raises(ValueError, match=r"shape \(2, 5\); it must be \[1, V\]"):
            Sampler([])(torch.zeros(2, 5), [request(params())])
        with pytest.raises(ValueError, match=r"shape \(5,\)"):
            Sampler([])(torch.zeros(5), [request(params())] * 5)

    def test_an_empty_batch_gives_no_tokens(self):
        assert Sampler([])(torch.zeros(0, 5), []) == []

    def test_the_callers_logits_and_requests_stay_as_they_are(self):
        logits = torch.randn(6, 40)
        before = logits.clone()
        options = [
            {"temperature": 0, "repetition_penalty": 1.5},
            {"top_k": 3, "top_p": 0.5},
            {"min_p": 0.3, "presence_penalty": 1.0},
            {"min_tokens": 9},
            {"logprobs": 5},
            {"top_p": 0.1},
        ]
        requests = [request(params(**option), seed=i, prompt=(1, 2), output=(3,)) for i, option in enumerate(options)]
        Sampler([EOS])(logits, requests)
        assert torch.equal(logits, before)
        assert all(r.prompt_token_ids == [1, 2] and r.output_token_ids == [3] for r in requests)

    def test_logits_made_in_inference_mode_are_welcome(self):
        with torch.inference_mode():
            logits = torch.randn(2, 30)
        requests = [request(params(top_p=0.9, presence_penalty=1.0), output=(3,)), request(params(temperature=0))]
        assert len(Sampler([EOS])(logits, requests)) == 2
