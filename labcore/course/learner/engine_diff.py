"""The hot-swap test: the learner's parts and labcore's in the same engine, compared step by step on one workload.

    swap_test(BlockPool)                            the kind of part follows from the base class, or the name
    swap_test(BlockPool, BlockTable, model=llm)     several at once, with a model that is loaded already
    swap_test(policy=Mine)                          or by name

The pool is small, so that requests are preempted and blocks are reused. After each step both engines must agree on every
token, on the number of free blocks and on the length of every block table, but not on the block ids. What is told, too:
which of the learner's methods the engine called, and how often. A part with nothing of the learner's is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labcore.course.learner.locate_error import locate_error
from labcore.course.learner.stand_in import is_labcores
from labcore.course.learner.swap_workload import SwapWorkload
from labcore.course.learner.text import shorten, wrapped
from labcore.course.learner.timeout import run_with_timeout, same_random_state
from labcore.course.learner.whose_code import class_of, counted, labcores_methods, learners_methods, report

if TYPE_CHECKING:
    from labcore.engine.engine import Engine
    from labcore.llm import LLM
    from labcore.models import LoadedModel
    from labcore.outputs import RequestOutput

# Argument of LLM → the class that a part of that kind is, or does as.
SEAMS = {
    "block_pool": "labcore.kvcache.blocks.BlockPool",
    "block_table": "labcore.kvcache.blocks.BlockTable",
    "kv_cache_manager": "labcore.kvcache.manager.KVCacheManager",
    "scheduler": "labcore.scheduler.scheduler.Scheduler",
    "prefix_cache": "labcore.kvcache.prefix.PrefixCache",
    "preemption": "labcore.scheduler.preemption.Preemption",
    "chunking": "labcore.scheduler.chunking.ChunkPolicy",
    "policy": "labcore.scheduler.policy.Policy",
    "budget": "labcore.scheduler.budget.AdaptiveBudget",
    "beam_search": "labcore.sampling.beam_search.BeamSearch",
    "attention_backend": "labcore.attention.backend.AttentionBackend",
}
# Parts that affect scheduling: plans may differ, outputs may not.
FREE_TO_PLAN = ("scheduler", "kv_cache_manager", "prefix_cache", "preemption", "chunking", "policy", "budget")

ENGINE = {"block_size": 4, "num_blocks": 36, "max_num_batched_tokens": 64, "enable_prefix_caching": False, "seed": 0}
PRIORITY = {"scheduling_policy": "priority", "max_num_seqs": 6}
SPECIAL: dict[str, dict[str, Any]] = {
    "chunking": {"max_num_batched_tokens": 16},
    "budget": {"max_num_batched_tokens": "auto", "tbt_target_ms": 50.0},
    "scheduler": PRIORITY,
    "policy": PRIORITY,
}
"""Settings of both engines that exercise a kind of part: short steps, few slots for urgent requests to take."""
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class StepFacts:
    """What must be equal after a step."""

    num_free: int
    tables: dict[str, tuple[int, int]]  # request → blocks in its table, tokens in them
    tokens: dict[str, list[int]]  # sequence → all its output tokens, for those that gained one


@dataclass
class Run:
    """One engine's run over the workload: its steps, the error that ended it, if any, and calls of the learner's methods."""

    steps: list[StepFacts] = field(default_factory=list)
    num_preemptions: int = 0
    trouble: str = ""
    calls: dict[tuple[str, str], int] = field(default_factory=dict)  # (argument of LLM, method) → calls

    def __str__(self) -> str:
        return f"{len(self.steps)} steps and {self.num_preemptions} preemption{'s' * (self.num_preemptions != 1)}"

    def final_tokens(self) -> dict[str, list[int]]:
        return {request: tokens for step in self.steps for request, tokens in step.tokens.items()}


@dataclass(frozen=True)
class EngineDiff:
    """Whether the runs agree, a sentence that says on what or where they differ, and one for each part on whose code ran."""

    name: str
    same: bool
    what: str
    whose: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = f"{'same' if self.same else 'not the same'} — {self.what}"
        if "," in self.name:  # several parts: the names take a line of their own
            lines = [f"swap_test {self.name}", wrapped(" " * 9, verdict)]
        else:
            lines = [wrapped(f"swap_test {self.name}", verdict)]
        return "\n".join(lines + [wrapped(" " * 9, said) for said in self.whose])


def swap_test(*parts: Any, model: str | Path | LoadedModel | LLM = "smollm2-135m", **named: Any) -> None:
    """Run the workload with the learner's parts and with labcore's. Prints the first difference, or that there is none.

    parts:    classes (or instances, where LLM takes one) that replace parts of the engine
    named:    parts by the argument of LLM: scheduler=…
    model:    as LLM takes it, or an LLM, whose model is then shared.
    An exception of a part is reported, not raised.
    """
    try:
        found = find_seams(parts, named)
        refuse_labcores(found)
        refuse_incomplete(found)
    except ValueError as error:
        print(f"swap_test   can't begin: {error}")
        return
    loaded = load_once(model)
    with same_random_state():
        print(compare(found, loaded))


def find_seams(parts: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The parts by the argument of LLM that each belongs to. Raises ValueError if there is none, or two for one."""
    found: dict[str, Any] = {}
    for seam, part in [*((find_seam(part), part) for part in parts), *named.items()]:
        if seam not in SEAMS:
            raise ValueError(f"there is no seam {seam!r}; there are {', '.join(SEAMS)}.")
        if seam in found:
            raise ValueError(f"two parts are given for {seam}; give one of each kind.")
        found[seam] = part
    if not found:
        raise ValueError("give a part, swap_test(BlockPool) or swap_test(block_pool=BlockPool).")
    return found


def find_seam(part: Any) -> str:
    """The argument of LLM that a part belongs to, by its base class or its name. Raises ValueError if it could be any."""
    kind = class_of(part)
    for seam in SEAMS:
        if issubclass(kind, base_of(seam)):
            return seam
    names = {path.rpartition(".")[2]: seam for seam, path in SEAMS.items()}
    for base in kind.__mro__:
        if base.__name__ in names:
            return names[base.__name__]
    raise ValueError(f"{kind.__name__} could be any part: say which, swap_test({next(iter(SEAMS))}={kind.__name__}).")


def base_of(seam: str) -> type:
    """The class of labcore's that a part of this kind is, or does as."""
    module, _, name = SEAMS[seam].rpartition(".")
    return getattr(import_module(module), name)


def refuse_labcores(parts: dict[str, Any]) -> None:
    """Raises ValueError for a part without a method of the learner's: ours against ours proves nothing."""
    for part in parts.values():
        kind = class_of(part)
        if any(map(is_labcores, kind.__mro__)) and not learners_methods(part):
            raise ValueError(f"nothing of yours is in {kind.__name__}: it is labcore's own.")


def refuse_incomplete(parts: dict[str, Any]) -> None:
    """Raises ValueError for a part that lacks methods which the engine calls."""
    from labcore.engine.build import missing_methods

    for seam, part in parts.items():
        missing = missing_methods(part, base_of(seam))
        if missing:
            raise ValueError(f"{name_of(part)} has no {', '.join(missing)} yet; run the cells that add what is missing.")


def load_once(model: str | Path | LoadedModel | LLM) -> LoadedModel:
    """The model, loaded: both engines share its weights."""
    from labcore.models import LoadedModel, load

    if hasattr(model, "engine"):
        return model.engine.loaded
    return model if isinstance(model, LoadedModel) else load(model, "auto", "auto")


def compare(parts: dict[str, Any], loaded: LoadedModel, timeout: float = TIMEOUT_SECONDS) -> EngineDiff:
    """Run the workload on both engines and find the first step at which they differ."""
    name = ", ".join(f"{seam}={name_of(part)}" for seam, part in parts.items())
    special = {key: value for seam in parts for key, value in SPECIAL.get(seam, {}).items()}
    learners = {seam: learners_methods(part) for seam, part in parts.items()}
    ours = run(loaded, special, max_steps=10_000)
    theirs = Run()

    def run_theirs() -> None:
        codes = {(seam, name): code for seam, methods in learners.items() for name, code in methods.items()}
        with counted(codes) as theirs.calls:
            run(loaded, {**special, **parts}, 4 * len(ours.steps) + 8, theirs)

    outcome = run_with_timeout(run_theirs, timeout)
    if outcome.timed_out:
        theirs.trouble = f"it was still running after {timeout:g} s{', ' if outcome.location else ''}{outcome.location}"
    elif outcome.error is not None:
        theirs.trouble = _said(outcome.error)
    diff = judge_runs(name, ours, theirs, may_plan=any(seam in FREE_TO_PLAN for seam in parts))
    whose = [
        report(name_of(part), {name: theirs.calls.get((seam, name), 0) for name in learners[seam]},
               labcores_methods(part, base_of(seam)))
        for seam, part in parts.items() if learners[seam]
    ]  # fmt: skip
    return replace(diff, whose=tuple(whose) if diff.same else ())


def name_of(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


def run(loaded: LoadedModel, parts: dict[str, Any], max_steps: int, result: Run | None = None) -> Run:
    """Serve the workload, with `parts` and settings in the engine, and append every step to the result."""
    from labcore.llm import LLM

    result = Run() if result is None else result
    engine = LLM(loaded, **{**ENGINE, **parts}).engine
    for outputs in SwapWorkload(engine).steps(max_steps):
        result.steps.append(facts_of(engine, outputs))
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
    said = f"{len(ours.final_tokens())} texts, {sum(map(len, ours.final_tokens().values()))} tokens, all identical"
    if ours.steps == theirs.steps:
        return EngineDiff(name, True, f"{said}; free blocks and table lengths agree throughout {ours}.")
    if may_plan:
        return EngineDiff(name, True, f"{said}; it plans otherwise, {theirs}, ours {ours}.")
    return EngineDiff(name, False, f"{said}, but {theirs}, ours {ours}.")


def first_difference(ours: list[StepFacts], theirs: list[StepFacts]) -> int | None:
    """The first step, from 1, after which two runs differ; None if they agree as long as both go on."""
    steps = enumerate(zip(ours, theirs, strict=False), 1)
    return next((number for number, (a, b) in steps if a != b), None)


def facts_of(engine: Engine, outputs: list[RequestOutput]) -> StepFacts:
    tables = {r.request_id: (len(r.table.blocks), r.table.num_tokens) for r in engine.scheduler.running}
    tokens = {
        output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{one.index}": list(one.token_ids)
        for output in outputs
        for one in output.outputs
    }
    return StepFacts(engine.pool.num_free, tables, tokens)


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
