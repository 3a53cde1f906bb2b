"""`labcore generate`: continue one or several prompts; print text, a stream, or JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from labcore.cli.options import OptionGroup, engine_options
from labcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from labcore import LLM
    from labcore.outputs import RequestOutput


SAMPLING = OptionGroup(SamplingParams, defaults={"temperature": 0.0, "max_tokens": 128})
ENGINE = engine_options(seed="the request's --seed decides")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore generate`."""
    parser = subparsers.add_parser("generate", help="continue or answer a prompt")
    parser.add_argument("prompts", nargs="+", metavar="prompt", help="a text, or - for standard input; several at once")
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder, or a hub id (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    parser.add_argument("--system", help="with --chat: the system message")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print text as it is generated")
    output.add_argument("--json", action="store_true", help="print one JSON document with texts, tokens and times")
    SAMPLING.add_to(parser.add_argument_group("sampling"))
    ENGINE.add_to(parser.add_argument_group("engine"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Load the model, generate, print. Raises ValueError for bad input, where possible before the model is loaded."""
    if arguments.stream and (len(arguments.prompts) > 1 or SAMPLING.given(arguments).get("n", 1) > 1):
        raise ValueError("--stream shows one text; give it one prompt and --n 1.")
    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system needs --chat: only a chat template has a place for it.")
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in arguments.prompts]
    params = SAMPLING.parse(arguments)
    ENGINE.parse(arguments)  # a bad value is reported before the model is loaded

    from labcore import LLM

    llm = LLM(arguments.model, **ENGINE.given(arguments))
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


def tokens_of(llm: LLM, prompt: str, arguments: argparse.Namespace) -> list[int]:
    """The prompt's token ids, with --chat under the chat template."""
    from labcore.engine.validation import check_text

    if not arguments.chat:
        return llm.prompt_tokens(prompt)
    if not prompt:
        raise ValueError("prompt is empty; it must have at least 1 character.")
    check_text("prompt", prompt)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return llm.chat_tokens([*system, {"role": "user", "content": prompt}])


def stream(llm: LLM, tokens: list[int], params: SamplingParams) -> None:
    """Print text as it is generated. The engine holds back incomplete characters and prefixes of stop strings."""
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
    """Print one text alone, several under a header line each."""
    texts = [(output, completion) for output in outputs for completion in output.outputs]
    for output, completion in texts:
        if len(texts) > 1:
            sample = f", sample {completion.index + 1}" if len(output.outputs) > 1 else ""
            print(f"--- {' '.join(output.prompt.split())[:60]}{sample}")
        print(completion.text)


def document(model: str, outputs: list[RequestOutput]) -> dict[str, Any]:
    """The outputs as JSON data: the field names of RequestOutput, times in seconds, neither infinity nor NaN."""
    requests = [{**asdict(output), "ttft": output.metrics.ttft, "e2e": output.metrics.e2e} for output in outputs]
    return finite({"model": model, "requests": requests})


def finite(value: Any) -> Any:
    """The same data with None for infinite floats and NaN."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
