"""The hot-swap test: the learner's part and labcore's in the same engine, compared step by step on eight prompts.

    swap_test(BlockPool)                            the kind of part follows from the base class, or the name
    swap_test(block_pool=BlockPool, model=llm)      or is given; with a model that is loaded already

The pool is small, so that requests are preempted and blocks are reused. After each step both engines must agree on every
token, on the number of free blocks and on the length of every block table, but not on the block ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labcore.course.learner.locate_error import locate_error
from labcore.course.learner.text import shorten, wrapped
from labcore.course.learner.timeout import run_with_timeout, same_random_state

if TYPE_CHECKING:
    from labcore.engine.engine import Engine
    from labcore.llm import LLM
    from labcore.models import LoadedModel

# Argument of LLM → the class that a part of that kind is, or does as.
SEAMS = {
    "block_pool": "labcore.kvcache.blocks.BlockPool",
    "scheduler": "labcore.scheduler.scheduler.Scheduler",
    "prefix_cache": "labcore.kvcache.prefix.PrefixCache",
    "preemption": "labcore.scheduler.preemption.Preemption",
    "chunking": "labcore.scheduler.chunking.ChunkPolicy",
    "attention_backend": "labcore.attention.backend.AttentionBackend",
}
# Parts that affect scheduling: plans may differ, outputs may not.
FREE_TO_PLAN = ("scheduler", "prefix_cache", "preemption", "chunking")

PROMPTS = (
    "The capital of France is",
    "A block table maps logical blocks to",
    "Once upon a time, in a small village by the sea, there lived an old man who could not sleep. Every night he",
    "def fibonacci(n):",
    "Three things to know about memory: first, it is never enough; second, most of it lies idle; third,",
    "Water boils at",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick brown",
    "List five animals that live in the forest:",
)
MAX_TOKENS = 16
ENGINE = {"block_size": 4, "num_blocks": 36, "max_num_batched_tokens": 64, "enable_prefix_caching": False, "seed": 0}
SPECIAL = {"chunking": {"max_num_batched_tokens": 16}}
"""Settings of both engines that exercise a kind of part: here nearly every prompt is chunked."""
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class StepFacts:
    """What must be equal after a step."""

    num_free: int
    tables: dict[str, tuple[int, int]]  # request → blocks in its table, tokens in them
    tokens: dict[str, list[int]]  # request → all its output tokens, for those that gained one


@dataclass
class Run:
    """One engine's run over the prompts: its steps, and the error that ended it, if any."""

    steps: list[StepFacts] = field(default_factory=list)
    num_preemptions: int = 0
    trouble: str = ""

    def __str__(self) -> str:
        return f"{len(self.steps)} steps and {self.num_preemptions} preemption{'s' * (self.num_preemptions != 1)}"

    def final_tokens(self) -> dict[str, list[int]]:
        return {request: tokens for step in self.steps for request, tokens in step.tokens.items()}


@dataclass(frozen=True)
class EngineDiff:
    """The result: whether the runs agree, and a sentence that says on what, or where they differ."""

    name: str
    same: bool
    what: str

    def __str__(self) -> str:
        return wrapped(f"swap_test {self.name}", f"{'same' if self.same else 'not the same'} — {self.what}")


def swap_test(part: Any = None, *, model: str | Path | LoadedModel | LLM = "smollm2-135m", **parts: Any) -> None:
    """Run the model with the learner's part and with labcore's, and print the first difference, or that there is none.

    part:     a class (or an instance, where LLM takes one) that replaces a part of the engine; or by name: scheduler=…
    model:    as LLM takes it, or an LLM, whose model is then shared.
    An exception of the part is reported, not raised.
    """
    try:
        seam, part = find_seam(part, parts)
    except ValueError as error:
        print(f"swap_test   can't begin: {error}")
        return
    loaded = load_once(model)
    with same_random_state():
        print(compare(seam, part, loaded))


def find_seam(part: Any, parts: dict[str, Any]) -> tuple[str, Any]:
    """The argument of LLM that a part belongs to. Raises ValueError if there is none, or not exactly one part."""
    if len(parts) + (part is not None) != 1:
        raise ValueError("give one part, swap_test(BlockPool) or swap_test(block_pool=BlockPool).")
    if parts:
        ((seam, part),) = parts.items()
        if seam not in SEAMS:
            raise ValueError(f"there is no seam {seam!r}; there are {', '.join(SEAMS)}.")
        return seam, part
    kind = part if isinstance(part, type) else type(part)
    for seam, path in SEAMS.items():
        module, _, name = path.rpartition(".")
        if issubclass(kind, getattr(import_module(module), name)):
            return seam, part
    names = {path.rpartition(".")[2]: seam for seam, path in SEAMS.items()}
    for base in kind.__mro__:
        if base.__name__ in names:
            return names[base.__name__], part
    raise ValueError(f"{kind.__name__} could be any part: say which, swap_test({next(iter(SEAMS))}={kind.__name__}).")


def load_once(model: str | Path | LoadedModel | LLM) -> LoadedModel:
    """The model, loaded: both engines share its weights."""
    from labcore.models import LoadedModel, load

    if hasattr(model, "engine"):
        return model.engine.loaded
    return model if isinstance(model, LoadedModel) else load(model, "auto", "auto")


def compare(seam: str, part: Any, loaded: LoadedModel, timeout: float = TIMEOUT_SECONDS) -> EngineDiff:
    """Run the prompts on both engines and find the first step at which they differ."""
    name = f"{seam}={getattr(part, '__name__', type(part).__name__)}"
    special = SPECIAL.get(seam, {})
    ours = run(loaded, special, max_steps=10_000)
    theirs = Run()
    outcome = run_with_timeout(lambda: run(loaded, {**special, seam: part}, 4 * len(ours.steps) + 8, theirs), timeout)
    if outcome.timed_out:
        theirs.trouble = f"it was still running after {timeout:g} s{', ' if outcome.location else ''}{outcome.location}"
    elif outcome.error is not None:
        theirs.trouble = _said(outcome.error)
    return judge_runs(name, ours, theirs, may_plan=seam in FREE_TO_PLAN)


def run(loaded: LoadedModel, parts: dict[str, Any], max_steps: int, result: Run | None = None) -> Run:
    """Serve the prompts greedily, with `parts` and settings in the engine, and append every step to the result."""
    from labcore.llm import LLM
    from labcore.sampling_params import SamplingParams

    result = Run() if result is None else result
    engine = LLM(loaded, **{**ENGINE, **parts}).engine
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        engine.add_request(f"r{number}", _encode(loaded, prompt), params)
    while engine.has_unfinished_requests() and len(result.steps) < max_steps:
        result.steps.append(_step(engine))
        result.num_preemptions = engine.stats()["num_preemptions"]
        engine.check_integrity()
    return result


def judge_runs(name: str, ours: Run, theirs: Run, may_plan: bool) -> EngineDiff:
    """Compare two runs. With `may_plan`, only the final tokens of each request must be equal."""
    parting = first_difference(ours.steps, theirs.steps)
    if parting and not may_plan:
        ours_then, theirs_then = ours.steps[parting - 1], theirs.steps[parting - 1]
        trouble = f" Then {theirs.trouble}." if theirs.trouble and parting == len(theirs.steps) else ""
        return EngineDiff(name, False, f"they part at step {parting}: {_difference(ours_then, theirs_then)}{trouble}")
    if theirs.trouble:
        return EngineDiff(name, False, f"all well for {len(theirs.steps)} steps, then {theirs.trouble}.")
    for request, tokens in ours.final_tokens().items():
        if theirs.final_tokens().get(request) != tokens:
            return EngineDiff(name, False, _other_words(request, tokens, theirs.final_tokens().get(request, [])))
    said = f"{len(ours.final_tokens())} prompts, {sum(map(len, ours.final_tokens().values()))} tokens, all identical"
    if ours.steps == theirs.steps:
        return EngineDiff(name, True, f"{said}; free blocks and table lengths agree throughout {ours}.")
    if may_plan:
        return EngineDiff(name, True, f"{said}; it plans otherwise, {theirs}, ours {ours}.")
    return EngineDiff(name, False, f"{said}, but {theirs}, ours {ours}.")


def first_difference(ours: list[StepFacts], theirs: list[StepFacts]) -> int | None:
    """The first step, from 1, after which two runs differ; None if they agree as long as both go on."""
    steps = enumerate(zip(ours, theirs, strict=False), 1)
    return next((number for number, (a, b) in steps if a != b), None)


def _step(engine: Engine) -> StepFacts:
    outputs = engine.step()
    tables = {r.request_id: (len(r.table.blocks), r.table.num_tokens) for r in engine.scheduler.running}
    tokens = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return StepFacts(engine.pool.num_free, tables, tokens)


def _encode(loaded: LoadedModel, prompt: str) -> list[int]:
    """Token ids of a prompt; of its bytes for a model without a tokenizer."""
    if loaded.tokenizer is None:
        return [byte % loaded.vocab_size for byte in prompt.encode()[:40]]
    return loaded.tokenizer.encode(prompt)


def _difference(ours: StepFacts, theirs: StepFacts) -> str:
    """The first difference of two steps, in words. Tables first: wrong tokens follow from wrong tables."""
    free = f"{theirs.num_free} blocks are free, in ours {ours.num_free}."
    if ours.tables.keys() != theirs.tables.keys():
        return f"{_names(theirs.tables)} run on, in ours {_names(ours.tables)}; {free}"
    for request, (blocks, tokens) in ours.tables.items():
        if theirs.tables[request] != (blocks, tokens):
            got, held = theirs.tables[request]
            return f"{request}'s table has {got} blocks for {held} tokens, in ours {blocks} for {tokens}; {free}"
    if ours.num_free != theirs.num_free:
        return free
    for request, tokens in ours.tokens.items():
        if theirs.tokens.get(request) != tokens:
            return _other_words(request, tokens, theirs.tokens.get(request, []))
    return f"{_names(theirs.tokens)} gained a token, in ours {_names(ours.tokens)}."


def _other_words(request: str, ours: list[int], theirs: list[int]) -> str:
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    got, wanted = (tokens[place] if place < len(tokens) else "missing" for tokens in (theirs, ours))
    return f"token {place + 1} of {request} is {got}, in ours {wanted}: it attended to KV that is not its own."


def _names(requests: dict[str, Any]) -> str:
    return ", ".join(sorted(requests)) or "none"


def _said(error: BaseException) -> str:
    """An error of the part, or a violated invariant of the engine, in words."""
    from labcore.engine.invariants import IntegrityError

    if isinstance(error, IntegrityError):
        return f"the engine's invariants are violated: {shorten(str(error), 160)}"
    location = locate_error(error)
    return f"it raised {type(error).__name__}: {shorten(str(error), 160)}" + (f" {location}" if location else "")
