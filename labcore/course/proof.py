"""The hot-swap proof: the learner's part and ours in the same engine, step by step, on eight prompts.

    prove(BlockPool)                            the seam is found by what the class is, or by its name
    prove(block_pool=BlockPool, model=llm)      or said; with the model that is loaded already

The pool is small, so that blocks run out, requests are preempted and blocks are handed out again. After each step the
two engines must agree on every token, on the number of free blocks and on the length of every block table; which blocks
those are is the part's own business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labcore.course.exercises import show
from labcore.course.limit import run_limited, same_random_state
from labcore.course.place import place_of_error

if TYPE_CHECKING:
    from labcore.engine import Engine
    from labcore.llm import LLM
    from labcore.models import LoadedModel

# Argument of LLM → the class that a part of that kind is, or does as.
SEAMS = {
    "block_pool": "labcore.blocks.BlockPool",
    "scheduler": "labcore.scheduler.Scheduler",
    "prefix_cache": "labcore.prefix.PrefixCache",
    "preemption": "labcore.scheduler.Preemption",
    "chunking": "labcore.chunking.ChunkPolicy",
    "attention_backend": "labcore.attention.base.AttentionBackend",
}
# Parts that decide who runs when: another decision is no mistake, as long as every request says the same.
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
MAX_TOKENS = 24
ENGINE = {"block_size": 4, "num_blocks": 48, "max_num_batched_tokens": 64, "enable_prefix_caching": False, "seed": 0}
LIMIT_SECONDS = 300


@dataclass(frozen=True)
class StepFacts:
    """What must be the same after a step, whoever wrote the part."""

    num_free: int
    tables: dict[str, tuple[int, int]]  # request → blocks in its table, tokens in them
    tokens: dict[str, list[int]]  # request → all its output tokens, for those that gained one


@dataclass
class Flight:
    """One engine's run over the prompts: its steps, and how it ended if not well."""

    steps: list[StepFacts] = field(default_factory=list)
    trouble: str = ""

    def final_tokens(self) -> dict[str, list[int]]:
        return {request: tokens for step in self.steps for request, tokens in step.tokens.items()}


@dataclass(frozen=True)
class Proof:
    """The verdict: do they agree, and one sentence that says on what, or where they part."""

    name: str
    same: bool
    what: str

    def __str__(self) -> str:
        return f"prove {self.name}   {'same' if self.same else 'not the same'} — {self.what}"


def prove(part: Any = None, *, model: str | Path | LoadedModel | LLM = "smollm2-135m", **parts: Any) -> None:
    """Run the model with the learner's part and with ours, and print whether they agree, or the first step where not.

    part:     a class (or an instance, where LLM takes one) that replaces a part of the engine; or by name: scheduler=…
    model:    as LLM takes it, or an LLM, whose model is then shared.
    Never raises what the part raises: that is a verdict, too.
    """
    try:
        seam, part = find_seam(part, parts)
    except ValueError as error:
        print(f"prove   can't begin: {error}")
        return
    loaded = load_once(model)
    with same_random_state():
        print(compare(seam, part, loaded))


def find_seam(part: Any, parts: dict[str, Any]) -> tuple[str, Any]:
    """The argument of LLM that a part belongs to. Raises ValueError if there is none, or not exactly one part."""
    if (part is None) + len(parts) != 1 + (part is None and not parts) or (part is not None and parts):
        raise ValueError("give one part, prove(BlockPool) or prove(block_pool=BlockPool).")
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
    raise ValueError(f"{kind.__name__} could be any part: say which, prove({next(iter(SEAMS))}={kind.__name__}).")


def load_once(model: str | Path | LoadedModel | LLM) -> LoadedModel:
    """The model, loaded: both engines share its weights."""
    from labcore.models import LoadedModel, load

    if hasattr(model, "engine"):
        return model.engine.loaded
    return model if isinstance(model, LoadedModel) else load(model, "auto", "auto")


def compare(seam: str, part: Any, loaded: LoadedModel, limit: float = LIMIT_SECONDS) -> Proof:
    """Fly both engines over the prompts and say whether, or from which step on, they differ."""
    name = f"{seam}={getattr(part, '__name__', type(part).__name__)}"
    ours = fly(loaded, {}, max_steps=10_000)
    theirs = Flight()
    outcome = run_limited(lambda: fly(loaded, {seam: part}, 4 * len(ours.steps) + 8, theirs), limit)
    if outcome.timed_out:
        theirs.trouble = f"it was still running after {limit:g} s{', ' if outcome.place else ''}{outcome.place}"
    elif outcome.error is not None:
        theirs.trouble = _said(outcome.error)
    return judge_flights(name, ours, theirs, may_plan=seam in FREE_TO_PLAN)


def fly(loaded: LoadedModel, parts: dict[str, Any], max_steps: int, flight: Flight | None = None) -> Flight:
    """Serve the prompts greedily, with `parts` in the engine, and write every step into the flight."""
    from labcore.llm import LLM
    from labcore.sampling_params import SamplingParams

    flight = Flight() if flight is None else flight
    engine = LLM(loaded, **ENGINE, **parts).engine
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        engine.add_request(f"r{number}", _encode(loaded, prompt), params)
    while engine.has_unfinished_requests() and len(flight.steps) < max_steps:
        flight.steps.append(_step(engine))
        engine.check_integrity()
    return flight


def judge_flights(name: str, ours: Flight, theirs: Flight, may_plan: bool) -> Proof:
    """Compare two flights. With `may_plan`, only what each request says in the end must be the same."""
    parting = next((n for n, (a, b) in enumerate(zip(ours.steps, theirs.steps, strict=False), 1) if a != b), None)
    if parting is not None and not (may_plan and ours.final_tokens() == theirs.final_tokens() and not theirs.trouble):
        step_ours, step_theirs = ours.steps[parting - 1], theirs.steps[parting - 1]
        if not may_plan or step_ours.tokens.keys() == step_theirs.tokens.keys():
            return Proof(name, False, f"they part at step {parting}: {_difference(step_ours, step_theirs)}")
    if theirs.trouble:
        return Proof(name, False, f"step {len(theirs.steps) + 1}: {theirs.trouble}")
    if ours.final_tokens() != theirs.final_tokens():
        missing = [r for r, tokens in ours.final_tokens().items() if theirs.final_tokens().get(r) != tokens]
        return Proof(
            name, False, f"after {len(theirs.steps)} steps {', '.join(missing)} had not said the same as in ours."
        )
    count = sum(len(tokens) for tokens in ours.final_tokens().values())
    said = f"{len(PROMPTS)} prompts, {count} tokens, all identical"
    if parting is None and len(ours.steps) == len(theirs.steps):
        return Proof(name, True, f"{said}; free blocks and table lengths agree after each of {len(ours.steps)} steps.")
    if not may_plan:
        return Proof(name, False, f"{said}, but it took {len(theirs.steps)} steps, ours {len(ours.steps)}.")
    return Proof(
        name,
        True,
        f"{said}, in {len(theirs.steps)} steps (ours {len(ours.steps)}); it plans differently from "
        f"step {parting or min(len(ours.steps), len(theirs.steps)) + 1} on.",
    )


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
    """The first thing in which two steps differ, in words. Tables first: they are the cause, tokens the consequence."""
    if ours.tables.keys() != theirs.tables.keys():
        return f"{_names(theirs.tables)} run, in ours {_names(ours.tables)}."
    for request, (blocks, tokens) in ours.tables.items():
        if theirs.tables[request] != (blocks, tokens):
            their_blocks, their_tokens = theirs.tables[request]
            return (
                f"{request}'s table has {their_blocks} blocks for {their_tokens} tokens, in ours {blocks} for {tokens}."
            )
    if ours.num_free != theirs.num_free:
        return f"{theirs.num_free} blocks are free, in ours {ours.num_free}."
    for request, tokens in ours.tokens.items():
        if theirs.tokens.get(request) != tokens:
            got = show(theirs.tokens.get(request, [])[-1:])
            return f"{request}'s token {len(tokens)} is {got}, in ours {show(tokens[-1:])}: it saw KV of another."
    return f"{_names(theirs.tokens)} gained a token, in ours {_names(ours.tokens)}."


def _names(requests: dict[str, Any]) -> str:
    return ", ".join(sorted(requests)) or "nobody"


def _said(error: BaseException) -> str:
    place = place_of_error(error)
    return f"{type(error).__name__}: {show(str(error), 160)[1:-1]}" + (f" ({place})" if place else "")
