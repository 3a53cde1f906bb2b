"""Options derived from dataclass fields: every field has one, or a reason why not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

import pytest

from labcore.cli.generate import ENGINE, SAMPLING
from labcore.cli.main import make_parser
from labcore.cli.options import ENGINE_NOT_OFFERED, NOT_BUILT, OptionGroup, field_texts, option
from labcore.config import EngineConfig
from labcore.sampling_params import BeamSearchParams, SamplingParams


def generate_options() -> dict[str, argparse.Action]:
    """The options of `labcore generate` by their spelling."""
    arguments = ["generate", "Hi"]
    (subparsers,) = make_parser(arguments)._subparsers._group_actions
    return subparsers.choices["generate"]._option_string_actions


@dataclass(frozen=True)
class Toy:
    """Settings of a toy.

    size      how large; 100% is
              the whole
    shape     its form
    """

    size: int | None | Literal["auto"] = 3
    weight: float | None = 1.5
    shape: Literal["round", "square", "odd"] = "round"
    hollow: bool = True
    names: str | Sequence[str] | None = None
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.size == 0:
            raise ValueError("size is 0; it must be above 0 if hollow is True.")


def parse(*arguments: str, group: OptionGroup | None = None):
    group = group or OptionGroup(Toy)
    parser = argparse.ArgumentParser(exit_on_error=False)
    group.add_to(parser)
    return group.parse(parser.parse_args(arguments))


# ------------------------------------------------------------------------------------------------ the options of generate


@pytest.mark.parametrize("group", [SAMPLING, ENGINE], ids=lambda group: group.settings.__name__)
def test_options_offer_every_field_or_say_why_not(group):
    options = generate_options()
    for f in fields(group.settings):
        reason = group.not_offered.get(f.name)
        assert reason is None or len(reason) > 10
        assert (option(f.name) in options) == (reason is None) or f.name == "seed"


@pytest.mark.parametrize("group", [SAMPLING, ENGINE], ids=lambda group: group.settings.__name__)
def test_options_reasons_are_about_fields_and_values_that_exist(group):
    hints = get_type_hints(group.settings)
    for name in group.not_offered:
        name, _, value = name.partition("=")
        assert name in hints and (not value or value in get_args(hints[name]))


@pytest.mark.parametrize("group", [SAMPLING, ENGINE], ids=lambda group: group.settings.__name__)
def test_options_help_is_the_docstring_s(group):
    texts, options = field_texts(group.settings), generate_options()
    for name in (f.name for f in fields(group.settings) if f.name not in group.not_offered):
        assert texts[name] and options[option(name)].help.replace("%%", "%").startswith(texts[name])


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams, BeamSearchParams])
def test_field_texts_cover_every_field(settings):
    assert list(field_texts(settings)) == [f.name for f in fields(settings)]
    assert all(field_texts(settings).values())


@pytest.mark.parametrize("settings", [{"preemption_mode": "swap"}, {"num_host_blocks": 8}, {"kv_cache_dtype": "int8"}])
def test_options_not_built_are_rejected_by_the_engine(settings):
    from tiny_models import tiny

    from labcore import LLM
    from labcore.models import from_model

    assert settings.keys() <= NOT_BUILT.keys()
    with pytest.raises(ValueError, match=next(iter(settings))):
        LLM(from_model(tiny("llama")), **settings)


def test_options_attention_backends_are_those_of_select():
    from labcore.attention.select import BACKENDS

    offered = generate_options()["--attention-backend"].choices
    assert set(offered) == set(BACKENDS)


def test_options_left_out_give_the_dataclass_defaults_but_for_temperature_and_max_tokens():
    parsed = make_parser(["generate", "Hi"]).parse_args(["generate", "Hi"])
    assert ENGINE.parse(parsed) == EngineConfig() and ENGINE.given(parsed) == {}
    assert SAMPLING.parse(parsed) == SamplingParams(temperature=0.0, max_tokens=128)


def test_options_seed_of_generate_is_the_request_s():
    arguments = ["generate", "Hi", "--seed", "7"]
    parsed = make_parser(arguments).parse_args(arguments)
    assert SAMPLING.parse(parsed).seed == 7 and "seed" not in ENGINE.given(parsed)
    assert "seed" not in ENGINE_NOT_OFFERED  # a command without sampling options offers the engine's


def test_options_of_every_kind_reach_the_settings():
    arguments = "generate Hi --no-enable-prefix-caching --num-blocks none --max-num-batched-tokens auto --top-p 0.5".split()
    arguments += ["--stop", "a", "--stop", "b c", "--stop-token-ids", "7", "--max-tokens", "none", "--ignore-eos"]
    parsed = make_parser(arguments).parse_args(arguments)
    assert ENGINE.parse(parsed) == EngineConfig(enable_prefix_caching=False, max_num_batched_tokens="auto")
    assert SAMPLING.parse(parsed) == SamplingParams(
        temperature=0.0, top_p=0.5, stop=("a", "b c"), stop_token_ids=(7,), max_tokens=None, ignore_eos=True
    )


# ------------------------------------------------------------------------------------------------------- kinds of fields


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Toy()),
        (["--size", "7"], Toy(size=7)),
        (["--size", "auto"], Toy(size="auto")),
        (["--size", "none"], Toy(size=None)),
        (["--weight", "2"], Toy(weight=2.0)),
        (["--weight", "none"], Toy(weight=None)),
        (["--shape", "square"], Toy(shape="square")),
        (["--no-hollow"], Toy(hollow=False)),
        (["--names", "a", "--names", "none"], Toy(names=["a", "none"])),
        (["--sizes", "1", "--sizes", "2"], Toy(sizes=[1, 2])),
    ],
)
def test_options_parse_each_kind_of_field(arguments, expected):
    assert parse(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--size", "x"], "--size: 'x' is not a whole number or auto or none"),
        (["--size", "1.5"], "--size: '1.5' is not a whole number"),
        (["--weight", "auto"], "--weight: 'auto' is not a number or none"),
        (["--sizes", "none"], "--sizes: 'none' is not a whole number"),
        (["--shape", "flat"], "--shape: invalid choice: 'flat'"),
    ],
)
def test_options_errors_name_the_option(arguments, says):
    with pytest.raises(argparse.ArgumentError) as caught:
        parse(*arguments)
    assert says in str(caught.value)


def test_options_put_the_option_in_place_of_the_field_in_an_error():
    with pytest.raises(ValueError, match=r"^--size is 0; it must be above 0 if hollow is True\.$"):
        parse("--size", "0")


def test_options_leave_out_fields_and_values_and_change_defaults():
    group = OptionGroup(Toy, {"hollow": "not built", "shape=odd": "not built"}, {"weight": 2.5})
    assert parse(group=group) == Toy(weight=2.5)
    for arguments in (["--hollow"], ["--shape", "odd"]):
        with pytest.raises((argparse.ArgumentError, SystemExit)):
            parse(*arguments, group=group)


def test_options_help_shows_text_default_and_values():
    parser = argparse.ArgumentParser()
    OptionGroup(Toy).add_to(parser)
    told = " ".join(parser.format_help().split())
    assert "--size N|auto|none how large; 100% is the whole (default: 3)" in told
    assert "--hollow, --no-hollow (default: on)" in told
    assert "--shape {round,square,odd} its form (default: round)" in told
