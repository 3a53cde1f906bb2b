"""SamplingParams and BeamSearchParams: what is accepted, what it becomes, and how the rest is refused."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcore.sampling_params import BeamSearchParams, SamplingParams

NOT_WHOLE = [True, False, 1.0, "1", math.nan, [1], np.float64(2)]
NOT_A_NUMBER = [
    True,
    "0.5",
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    [0.5],
    1j,
    np.float32("nan"),
    np.float32("inf"),
    None,
]

BAD = (
    [("n", value) for value in [0, -1, 4097, 10**9, None, *NOT_WHOLE]]
    + [("temperature", value) for value in [-0.1, -1, -5e-324, *NOT_A_NUMBER]]
    + [("top_p", value) for value in [0, -0.1, 1.0000001, 2, *NOT_A_NUMBER]]
    + [("top_k", value) for value in [-2, None, *NOT_WHOLE]]
    + [("min_p", value) for value in [-0.1, 1.1, *NOT_A_NUMBER]]
    + [("seed", value) for value in [-1, 2**63, *NOT_WHOLE]]
    + [("max_tokens", value) for value in [0, -1, *NOT_WHOLE]]
    + [("min_tokens", value) for value in [-1, None, *NOT_WHOLE]]
    + [("stop", value) for value in ["", [""], ["a", ""], 1, [1], b"a", [b"a"], {"a": 1}, True]]
    + [("stop_token_ids", value) for value in ["1", [-1], [1.0], ["1"], [True], [None], 1, b"1"]]
    + [("ignore_eos", value) for value in [0, 1, "yes", None]]
    + [("logprobs", value) for value in [-1, *NOT_WHOLE]]
    + [("presence_penalty", value) for value in [-2.1, 2.1, *NOT_A_NUMBER]]
    + [("frequency_penalty", value) for value in [-2.1, 2.1, *NOT_A_NUMBER]]
    + [("repetition_penalty", value) for value in [0, -1, 0.009, 101, *NOT_A_NUMBER]]
)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: repr(x)[:24])
def test_a_bad_value_is_refused_in_one_line_that_names_field_value_and_range(name, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is {repr(value)[:80]}")
    assert "it must be " in message
    assert "\n" not in message and len(message) < 250


def test_the_defaults_are_vllms():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.seed) == (1, 1.0, 1.0, 0, 0.0, None)
    assert (p.max_tokens, p.min_tokens, p.stop, p.stop_token_ids, p.ignore_eos, p.logprobs) == (
        16,
        0,
        (),
        (),
        False,
        None,
    )
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)


def test_the_ends_of_every_range_are_accepted_and_kept_as_they_are():
    low = dict(
        n=1, temperature=0.0, top_p=1e-9, top_k=1, min_p=0.0, seed=0, max_tokens=1, min_tokens=0, logprobs=0,
        presence_penalty=-2.0, frequency_penalty=-2.0, repetition_penalty=0.01,
    )  # fmt: skip
    high = dict(
        n=1000, temperature=1e300, top_p=1.0, top_k=10**9, min_p=1.0, seed=2**63 - 1, max_tokens=10**9,
        min_tokens=10**9, logprobs=10**6, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=100.0,
    )  # fmt: skip
    for values in (low, high):
        params = SamplingParams(**values)
        assert {name: getattr(params, name) for name in values} == values


def test_minus_one_turns_top_k_off_as_zero_does():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()


def test_a_single_stop_string_and_lists_become_tuples():
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=()).stop == SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=[5, 7]).stop_token_ids == (5, 7)
    assert SamplingParams(stop_token_ids=range(3)).stop_token_ids == (0, 1, 2)


def test_numpy_numbers_become_pythons_own():
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_p=np.float64(0.5), top_k=np.int32(5), seed=np.uint64(7),
        max_tokens=np.int16(9), stop_token_ids=[np.int64(3)], logprobs=np.int8(2), presence_penalty=np.float16(1),
    )  # fmt: skip
    for name in ("n", "top_k", "seed", "max_tokens", "logprobs"):
        assert type(getattr(params, name)) is int
    for name in ("temperature", "top_p", "presence_penalty"):
        assert type(getattr(params, name)) is float
    assert type(params.stop_token_ids[0]) is int


def test_whole_numbers_serve_as_floats():
    assert type(SamplingParams(temperature=1, top_p=1).temperature) is float


def test_min_tokens_may_reach_max_tokens_but_not_pass_it():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=99, max_tokens=None).min_tokens == 99
    with pytest.raises(ValueError, match=r"^min_tokens is 17; .* from 0 to max_tokens, which is 16\.$"):
        SamplingParams(min_tokens=17)


def test_several_greedy_continuations_are_refused_because_they_would_be_one():
    with pytest.raises(ValueError, match=r"^n is 2; it must be 1 when temperature is 0"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2, temperature=1e-6).n == 2


def test_greedy_means_temperature_zero_and_nothing_else():
    assert SamplingParams(temperature=0).is_greedy and SamplingParams(temperature=-0.0).is_greedy
    assert not SamplingParams(temperature=1e-12).is_greedy
    assert not SamplingParams(top_k=1).is_greedy


def test_penalties_at_rest_are_known_to_be_off():
    assert not SamplingParams().has_penalties
    for changed in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 0.9}):
        assert SamplingParams(**changed).has_penalties


def test_params_are_frozen_and_hashable_and_can_be_varied():
    params = SamplingParams(stop=["x"], stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3
    assert hash(params) == hash(SamplingParams(stop="x", stop_token_ids=(1,)))
    assert dataclasses.replace(params, n=2) == SamplingParams(n=2, stop=["x"], stop_token_ids=[1])
    with pytest.raises(ValueError, match="^n is 0"):
        dataclasses.replace(params, n=0)


def test_a_very_long_value_is_cut_in_the_message():
    with pytest.raises(ValueError) as caught:
        SamplingParams(stop=["x" * 10_000, ""])
    assert len(str(caught.value)) < 250


@given(st.floats() | st.integers() | st.none() | st.booleans() | st.text(max_size=3))
def test_any_temperature_is_either_kept_as_a_float_or_refused_by_name(value):
    try:
        params = SamplingParams(temperature=value)
    except ValueError as error:
        assert str(error).startswith("temperature is ")
        assert isinstance(value, (bool, str, type(None))) or not 0 <= value < math.inf
    else:
        assert params.temperature == float(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_width", value) for value in [0, *NOT_WHOLE]]
    + [("max_tokens", value) for value in [0, None, *NOT_WHOLE]]
    + [("length_penalty", value) for value in [-10.1, 400, 1e308, *NOT_A_NUMBER]]
    + [("ignore_eos", value) for value in [0, None]]
    + [("temperature", value) for value in [1, 0.1, *NOT_A_NUMBER]],
    ids=lambda x: repr(x)[:24],
)
def test_a_bad_beam_search_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError) as caught:
        BeamSearchParams(**{name: value})
    assert str(caught.value).startswith(f"{name} is {repr(value)[:80]}") and "it must be " in str(caught.value)


def test_beam_search_defaults_and_negative_length_penalty():
    params = BeamSearchParams()
    assert (params.beam_width, params.max_tokens, params.length_penalty, params.ignore_eos) == (4, 64, 1.0, False)
    assert BeamSearchParams(beam_width=np.int64(2), length_penalty=-1).length_penalty == -1.0


def test_the_module_imports_no_torch():
    code = "import sys, labcore.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
