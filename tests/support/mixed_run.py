"""One run of everything: plain requests, n > 1, beams, priorities and prefix hits, in a pool that is too small for them.

The model is made up (see `remembering`), so that what each request must say is known without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines import assert_recorded_truly
from remembering import expected_beams, expected_completion, remembering_llm
from tiny_models import tiny

from labcore import BeamSearchParams, SamplingParams
from labcore.models import from_model
from labcore.outputs import RequestOutput

LOADED = from_model(tiny("qwen3"))


class Fault(Exception):
    """What a part raises in a test."""


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def sampled(max_tokens: int, seed: int, **options) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=max_tokens, ignore_eos=True, **options)


def assert_answered(output: RequestOutput, prompt: Sequence[int], params: SamplingParams) -> None:
    """The output is the whole answer of an undisturbed run."""
    assert output.finished and output.error is None
    for k, completion in enumerate(output.outputs):
        seed = 0 if params.seed is None else params.seed + k
        expected = expected_completion(prompt, params, seed)
        assert (completion.token_ids, completion.text, completion.finish_reason) == expected


class MixedRun:
    """A workload over every kind of request, in a pool that is too small for it: preemptions, forks, siblings, beams."""

    PARAMS = {
        "plain": greedy(14),
        "n": sampled(7, seed=3, n=3),
        "beams": BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True),
        "again": greedy(9),
        "urgent": greedy(8),
    }
    PROMPTS = {
        "plain": [0, 1, 2, 3, 4, 0, 1, 2],
        "n": [0, 1, 2, 3, 4, 0],
        "beams": [0, 1, 2, 3, 0],
        "again": [0, 1, 2, 3, 4, 0, 1, 2, 1],
        "urgent": [0, 1, 2, 3, 4, 0, 1, 2, 1, 3],
    }

    def __init__(self, is_recorder_sound: bool = True, **settings) -> None:
        settings = {"num_blocks": 14, "max_num_seqs": 6, "max_num_batched_tokens": 12, "record": True} | settings
        self.llm = remembering_llm(LOADED, scheduling_policy="priority", max_model_len=32, **settings)
        self.engine = self.llm.engine
        self.is_recorded = is_recorder_sound and settings["record"]
        self.done: dict[str, RequestOutput] = {}
        self.errors: list[BaseException] = []

    def add(self) -> None:
        """Add what isn't there yet; the urgent one when the others are under way."""
        for name, prompt in self.PROMPTS.items():
            if name not in self.done and name not in self.engine.request_ids():
                if name != "urgent" or self.engine.stats()["num_running"] > 3:
                    self.engine.add_request(name, prompt, self.PARAMS[name], priority=int(name != "urgent"))

    def step(self) -> None:
        for output in self.engine.step():
            assert output.request_id not in self.done
            if output.finished:
                self.done[output.request_id] = output

    def attempt(self, call: Callable[[], None]) -> None:
        """Call, and see whether all is in order, whatever it raises."""
        try:
            call()
        except (Fault, KeyboardInterrupt) as error:
            self.errors.append(error)
        self.engine.check_integrity()
        if self.is_recorded:
            assert_recorded_truly(self.engine)

    def finish(self, add: Callable[[], None] | None = None, step: Callable[[], None] | None = None) -> None:
        """Run to the end, with `add` and `step` in place of this run's own."""
        for _ in range(400):
            self.attempt(add or self.add)
            if self.done.keys() == self.PARAMS.keys():
                break
            self.attempt(step or self.step)
        assert self.done.keys() == self.PARAMS.keys() and not self.engine.has_unfinished_requests()
        assert self.engine.pool.num_free == self.engine.pool.num_blocks

    def assert_answers(self) -> list[RequestOutput]:
        """What didn't fail says what it would have said. Returns what failed."""
        for name, output in self.done.items():
            if output.error is None and name == "beams":
                texts = [tuple(text.token_ids) for text in output.outputs]
                assert texts == expected_beams(self.PROMPTS[name], self.PARAMS[name])
            elif output.error is None:
                assert_answered(output, self.PROMPTS[name], self.PARAMS[name])
        return [output for output in self.done.values() if output.error is not None]
