"""Command-line options derived from a settings dataclass, so that each setting is declared and explained once.

    field of EngineConfig                                option
    block_size: int = 16                                 --block-size N
    max_model_len: int | None = None                     --max-model-len N|none
    max_num_batched_tokens: int | Literal["auto"]        --max-num-batched-tokens N|auto
    scheduling_policy: Literal["fcfs", "priority"]       --scheduling-policy {fcfs,priority}
    enable_prefix_caching: bool = True                   --enable-prefix-caching, --no-enable-prefix-caching
    stop: str | Sequence[str] | None  (SamplingParams)   --stop STOP, which may be repeated

The help text is the field's line in the class docstring: its name, spaces, the text; continuation lines are indented.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from labcore.config import EngineConfig

Settings = TypeVar("Settings")

NOT_BUILT = {
    "preemption_mode": "only 'recompute' exists; 'swap' comes with notebook 07",
    "num_host_blocks": "swap comes with notebook 07",
    "kv_cache_dtype": "only 'auto' exists; 'int8' and 'fp8' come with notebook 08",
}
"""Fields of EngineConfig that the engine does not implement yet."""

ENGINE_NOT_OFFERED = NOT_BUILT | {
    "record": "the record is saved from Python: llm.engine.recorder.save(FILE)",
    "attention_backend=custom": "a backend object is passed in Python: LLM(attention_backend=…)",
}
"""Fields, or values ("field=value"), that a command does not offer, each with the reason."""


@dataclass(frozen=True)
class OptionGroup(Generic[Settings]):
    """The options of one settings dataclass.

    settings      the dataclass
    not_offered   fields without an option, or values that are no choice ("field=value"), each with the reason
    defaults      defaults of this command where they differ from the dataclass's
    """

    settings: type[Settings]
    not_offered: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add one option a field to a parser, or to a group of one."""
        hints, texts = get_type_hints(self.settings), field_texts(self.settings)
        for f in dataclasses.fields(self.settings):
            if f.name not in self.not_offered:
                default = shown(self.defaults.get(f.name, f.default))
                parser.add_argument(
                    option(f.name),
                    default=argparse.SUPPRESS,
                    help=f"{texts.get(f.name, '')} (default: {default})".lstrip().replace("%", "%%"),
                    **self._parsing(f.name, hints[f.name]),
                )

    def given(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Field values: this command's defaults, and the options that were given."""
        names = [f.name for f in dataclasses.fields(self.settings) if f.name not in self.not_offered]
        return {**self.defaults, **{name: getattr(arguments, name) for name in names if hasattr(arguments, name)}}

    def parse(self, arguments: argparse.Namespace) -> Settings:
        """The settings object. Raises ValueError in the dataclass's words, with the option in place of the field."""
        try:
            return self.settings(**self.given(arguments))
        except ValueError as error:
            names = "|".join(f.name for f in dataclasses.fields(self.settings))
            raise ValueError(re.sub(rf"^(?:{names})\b", lambda name: option(name[0]), str(error))) from error

    def _parsing(self, name: str, hint: Any) -> dict[str, Any]:
        """The keywords of add_argument that follow from a field's type."""
        members = get_args(hint) if get_origin(hint) not in (None, Literal, Sequence) else (hint,)
        if bool in members:
            return {"action": argparse.BooleanOptionalAction}
        for member in members:
            if get_origin(member) is Sequence:
                return {"action": "append", **self._parsing(name, get_args(member)[0])}
        words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
        words = [word for word in words if f"{name}={word}" not in self.not_offered]
        kind = next((member for member in members if member in (int, float, str)), None)
        if kind is None:
            return {"choices": words}
        words += ["none"] if NoneType in members else []
        metavar = "|".join(["N" if kind is int else "X" if kind is float else name.upper(), *words])
        return {"type": number_or_word(kind, words), "metavar": metavar}


def option(name: str) -> str:
    """"block_size" → "--block-size"."""
    return "--" + name.replace("_", "-")


def number_or_word(kind: type, words: Sequence[str]) -> Any:
    """A parser of values: one of `words` ("none" gives None), or a `kind`. Raises ArgumentTypeError for anything else."""

    def parse(text: str) -> Any:
        if text in words:
            return None if text == "none" else text
        try:
            return kind(text)
        except ValueError:
            expected = ["a whole number" if kind is int else "a number", *words]
            raise argparse.ArgumentTypeError(f"{text!r} is not {' or '.join(expected)}") from None

    return parse


def shown(default: Any) -> str:
    """A default as the command line writes it."""
    return {None: "none", True: "on", False: "off"}[default] if isinstance(default, bool | NoneType) else str(default)


def field_texts(settings: type) -> dict[str, str]:
    """What the class docstring says of each field: {"block_size": "tokens per KV block, 1 … 256"}."""
    names = {f.name for f in dataclasses.fields(settings)}
    texts: dict[str, str] = {}
    current = None
    for line in inspect.cleandoc(settings.__doc__ or "").splitlines():
        word, _, text = line.partition(" ")
        if word:
            current = word if word in names else None
            texts |= {current: text.strip()} if current else {}
        elif current and line.strip():
            texts[current] += " " + line.strip()
    return texts


def engine_options(**not_offered: str) -> OptionGroup[EngineConfig]:
    """The engine's options, but for the fields in `not_offered`."""
    return OptionGroup(EngineConfig, {**ENGINE_NOT_OFFERED, **not_offered})
