"""`labcore generate`: one prompt or several, whole or as they grow, as text or as JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labcore import LLM, SamplingParams
    from labcore.outputs import RequestOutput


def whole_or_auto(text: str) -> int | str:
    """An option's value: a whole number, or the word auto."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, nor auto") from None


ENGINE_OPTIONS = (
    ("device", str, '"cpu", "cuda", "cuda:1", … (default: auto)'),
    ("dtype", str, '"float32", "bfloat16", "float16" (default: auto)'),
    ("attention-backend", str, '"torch" or "triton" (default: auto)'),
    ("block-size", int, "tokens per KV block (default: 16)"),
    ("num-blocks", int, "KV blocks in the pool (default: what fits)"),
    ("kv-cache-memory-gb", float, "GiB of memory for the KV pool, on a CPU (default: 1)"),
    ("gpu-memory-utilization", float, "share of the GPU's memory to use in all (default: 0.9)"),
    ("max-model-len", int, "most tokens of prompt and output together (default: the model's)"),
    ("max-num-seqs", int, "most requests at once (default: 64)"),
    ("max-num-batched-tokens", whole_or_auto, 'token budget of one step, or "auto" (default: 2048)'),
    ("tbt-target-ms", float, 'milliseconds between two tokens that an "auto" budget aims at (default: 200)'),
    ("kv-cache-dtype", str, '"int8" or "fp8" (default: the model\'s)'),
)
SAMPLING_OPTIONS = (
    ("max-tokens", int, 128, "most tokens to generate"),
    ("temperature", float, 0.0, "0 takes the likeliest token each time"),
    ("top-p", float, 1.0, "keep the likeliest tokens up to this share"),
    ("top-k", int, 0, "keep this many of the likeliest tokens; 0 keeps all"),
    ("min-p", float, 0.0, "drop tokens below this share of the likeliest one's probability"),
    ("repetition-penalty", float, 1.0, "above 1 discourages tokens that were there already"),
    ("n", int, 1, "continuations of each prompt"),
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore generate`."""
    parser = subparsers.add_parser("generate", help="continue or answer a prompt")
    parser.add_argument("prompts", nargs="+", metavar="prompt", help="a text, or - for standard input; several at once")
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder, or a hub id (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    parser.add_argument("--system", help="with --chat: the system message")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print the text as it grows")
    output.add_argument("--json", action="store_true", help="print one JSON document with texts, tokens and times")
    sampling = parser.add_argument_group("sampling")
    for name, kind, default, text in SAMPLING_OPTIONS:
        sampling.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    sampling.add_argument("--seed", type=int, help="of the random choices (default: the engine's)")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may repeat")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    engine = parser.add_argument_group("engine")
    for name, kind, text in ENGINE_OPTIONS:
        engine.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    engine.add_argument(
        "--trust-remote-code",
        action="store_true",
        default=argparse.SUPPRESS,
        help="run the Python files that come with the model",
    )
    engine.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt in full")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Load the model, generate, print. Raises ValueError for bad input, where possible before the model is loaded."""
    if arguments.stream and (len(arguments.prompts) > 1 or arguments.n > 1):
        raise ValueError("--stream shows one text; give it one prompt and --n 1.")
    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system needs --chat: only a chat template has a place for it.")
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in arguments.prompts]
    params = sampling_params(arguments)

    from labcore import LLM

    llm = LLM(arguments.model, **engine_settings(arguments))
    tokens = [tokens_of(llm, prompt, arguments) for prompt in prompts]
    if arguments.stream:
        stream(llm, tokens[0], params)
        return 0
    outputs = llm.generate(tokens, params)
    for output, prompt in zip(outputs, prompts, strict=True):
        output.prompt = prompt
    if arguments.json:
        print(json.dumps(document(arguments.model, outputs), indent=2))
    else:
        print_texts(outputs)
    check_answered(outputs)
    return 0


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling options as the engine takes them."""
    from labcore import SamplingParams

    chosen = {name.replace("-", "_") for name, *_ in SAMPLING_OPTIONS} | {"seed", "stop", "ignore_eos"}
    return SamplingParams(**{name: getattr(arguments, name) for name in chosen})


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by their names in EngineConfig."""
    names = [name.replace("-", "_") for name, *_ in ENGINE_OPTIONS] + ["trust_remote_code"]
    settings = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {**settings, "enable_prefix_caching": False} if arguments.no_prefix_caching else settings


def tokens_of(llm: LLM, prompt: str, arguments: argparse.Namespace) -> list[int]:
    """The prompt's token ids, under the chat template if that was asked for."""
    from labcore.engine.validation import check_text

    if not arguments.chat:
        return llm.prompt_tokens(prompt)
    if not prompt:
        raise ValueError("prompt is empty; it must have at least 1 character.")
    check_text("prompt", prompt)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return llm.chat_tokens([*system, {"role": "user", "content": prompt}])


def stream(llm: LLM, tokens: list[int], params: SamplingParams) -> None:
    """Print the text as it grows. The engine holds back half characters and the beginnings of stop strings."""
    llm.engine.add_request("stream", tokens, params)
    shown = ""
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            text = output.outputs[0].text
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()
    check_answered([output])


def check_answered(outputs: list[RequestOutput]) -> None:
    """Raises RuntimeError, in one line, if a prompt failed by itself. What the others say is printed by then."""
    failed = [f"prompt {i + 1} failed: {output.error}" for i, output in enumerate(outputs) if output.error is not None]
    if failed:
        raise RuntimeError("; ".join(failed))


def print_texts(outputs: list[RequestOutput]) -> None:
    """One text as it is; several under a line that says which."""
    texts = [(output, completion) for output in outputs for completion in output.outputs]
    for output, completion in texts:
        if len(texts) > 1:
            sample = f", sample {completion.index + 1}" if len(output.outputs) > 1 else ""
            print(f"--- {' '.join(output.prompt.split())[:60]}{sample}")
        print(completion.text)


def document(model: str, outputs: list[RequestOutput]) -> dict[str, Any]:
    """The outputs as JSON has them: the field names of RequestOutput, times in seconds, no infinity and no NaN."""
    requests = [{**asdict(output), "ttft": output.metrics.ttft, "e2e": output.metrics.e2e} for output in outputs]
    return finite({"model": model, "requests": requests})


def finite(value: Any) -> Any:
    """The same data with None for every float that JSON can't say."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
