"""Load a model, or take one in memory, with the metadata that the engine needs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from labcore.models.errors import ModelError, UnsupportedModel
from labcore.models.layers import LayerShape
from labcore.models.probe import first_line, probe
from labcore.models.resolver import resolve
from labcore.models.support import check_supported
from labcore.models.token_decoder import TokenDecoder
from labcore.models.view import view_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A supported decoder, in eval mode.

    name                 as requested
    model                each engine runs its own view of it, see `labcore.models.view`
    tokenizer            None if the model has none: prompts must then be token ids
    layers               shape of each attention layer, in forward order
    max_positions        maximum tokens of a sequence, prompt and output together
    vocab_size           width of the logits
    eos_token_ids        EOS tokens, ascending
    generation_defaults  sampling values of the model's generation config; for information, not used by the engine
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    layers: list[LayerShape]
    max_positions: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float] = field(default_factory=dict)

    @cached_property
    def decoder(self) -> TokenDecoder | None:
        """The token decoder for detokenizers; None without a tokenizer."""
        return None if self.tokenizer is None else TokenDecoder(self.tokenizer)


def load(
    name: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model from a folder, the cache or the Hugging Face hub.

    name                "smollm2-135m", a local folder, or a Hugging Face id of a supported decoder
    device              "auto" (cuda if usable, else cpu), "cpu", "cuda", "cuda:1", …
    dtype               "auto" (cpu: float32 · cuda: bfloat16, float16 below sm_80), "float32", "bfloat16", "float16"
    trust_remote_code   run Python code that comes with the model; with False, never, and without a prompt

    Raises ValueError for an invalid argument, UnsupportedModel for an unsupported architecture, and ModelError if the
    model can't be downloaded or read.
    """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    source = resolve(name)
    with quiet_transformers(progress_bars=isinstance(source, str)), one_line_errors(name, source):
        # With None, transformers would ask on stdin whether to run a model's own code.
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if not (trust_remote_code and getattr(config, "auto_map", None)):  # else from_model checks the loaded class
            check_supported(config)
        # A config may name implementations that are not installed here. Attention is replaced in any case.
        config._attn_implementation = config._experts_implementation = None
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
        tokenizer = None
        if has_tokenizer(source):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if missing := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
        raise ModelError(
            f"the weights of {name} do not fit its config: {len(missing)} tensors are missing or misshapen, "
            f"{missing[0]} for one — download the model again."
        )
    return from_model(model.requires_grad_(False), tokenizer, str(name))


def from_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str | None = None
) -> LoadedModel:
    """Take a model that is already in memory. `model` is not modified: only its weights are shared.

    `model` may be trained or used meanwhile; after a change of weights see `Engine.reset_prefix_cache`. Raises
    UnsupportedModel for an unsupported architecture.
    """
    check_supported(model)
    model = view_of(model)
    return LoadedModel(
        name=name or model.config.model_type,
        model=model,
        tokenizer=tokenizer,
        layers=probe(model),
        max_positions=max_positions(model.config),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        eos_token_ids=eos_token_ids(model, tokenizer),
        generation_defaults=generation_defaults(model),
    )


def pick_device(device: str | torch.device) -> torch.device:
    """The device to compute on. Raises ValueError for an unknown or unavailable device.

    mps is rejected: no backend of labcore is tested on it.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() and cuda_works() else "cpu")
    allowed = 'it must be "auto", "cpu", "cuda" or "cuda:N"'
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; {allowed}.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is '{device}'; {allowed} — labcore is not tested on others; on a Mac, use 'cpu'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is '{device}', and torch finds no GPU to use — see `labcore doctor`, or use 'cpu'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is '{device}'; this machine has cuda:0 … cuda:{torch.cuda.device_count() - 1}.")
    return device


def cuda_works() -> bool:
    """Whether a kernel runs: a GPU too old for the torch build is listed as available, but fails."""
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        warnings.warn(f"using the CPU, because the GPU fails: {first_line(error)} — see `labcore doctor`.", stacklevel=3)
        return False
    return True


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and KV cache. Raises ValueError if it isn't a 16- or 32-bit float."""
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if dtype in DTYPES.values():
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of 'auto', {', '.join(map(repr, DTYPES))}.")
    return DTYPES[dtype]


def max_positions(config: Any) -> int:
    """Maximum tokens of a sequence, from a transformers config.

    LongRoPE changes the rotary angles of a whole batch once a sequence exceeds the original training length, which
    invalidates cached K. So the limit is that original length.
    """
    text_config = config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    if not limit:
        raise UnsupportedModel.because(config.model_type, "does not say how many positions it has")
    rope = getattr(text_config, "rope_parameters", None) or {}
    for settings in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if settings.get("rope_type") == "longrope":
            limit = min(limit, settings.get("original_max_position_embeddings", limit))
    return limit


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """EOS tokens of the generation config, or else of the config, plus the tokenizer's."""
    ids: set[int] = set()
    for settings in (model.generation_config, model.config.get_text_config(decoder=True)):
        if not ids and (eos := getattr(settings, "eos_token_id", None)) is not None:
            ids.update([eos] if isinstance(eos, int) else eos)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def generation_defaults(model: PreTrainedModel) -> dict[str, float]:
    """Sampling values of the model's generation config."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: getattr(model.generation_config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def has_tokenizer(source: Path | str) -> bool:
    """Whether a folder has a tokenizer. Models from the hub are assumed to have one."""
    return isinstance(source, str) or any((source / file).is_file() for file in TOKENIZER_FILES)


@contextmanager
def quiet_transformers(progress_bars: bool) -> Iterator[None]:
    """Suppress transformers' log messages and, unless `progress_bars`, its progress bars."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if bars and not progress_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars and not progress_bars:
            logging.enable_progress_bar()


@contextmanager
def one_line_errors(name: str | Path, source: Path | str) -> Iterator[None]:
    """Convert exceptions of transformers' loading code to a one-line ModelError that says what to do."""
    try:
        yield
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers has no common exception class
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} brings Python code of its own, and labcore runs none by itself — read it, and if you trust it pass "
                "trust_remote_code=True (labcore generate: --trust-remote-code), or choose a model without code."
            ) from error
        if isinstance(error, ImportError):
            advice = "install the package that it asks for, or choose another model"
        elif isinstance(source, Path):
            advice = "its files may be damaged or of another kind; download the model again, or pass another folder"
        else:
            advice = (
                "check its name and the network; log in with `hf auth login` if it is gated; or pass a local folder, "
                "or 'smollm2-135m'"
            )
        raise ModelError(f"can't load {name} ({type(error).__name__}: {first_line(error)}) — {advice}.") from error
