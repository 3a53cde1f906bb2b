"""What the explorer's buttons do to an engine, without any widget: submit, step, fork, abort, shrink the pool."""

from __future__ import annotations

from itertools import count
from typing import Any

from labcore.recorder import Recording
from labcore.sampling_params import SamplingParams


class EngineControl:
    """One person at one engine that records. Every method raises ValueError, in plain words, and then changes nothing.

    llm   an `LLM` made with record=True
    """

    def __init__(self, llm: Any) -> None:
        if not isinstance(llm.engine.recorder, Recording):
            raise ValueError("this llm keeps no flight record to look at — make it with LLM(…, record=True).")
        self.llm = llm
        self.engine = llm.engine
        self.texts: dict[str, str] = {}
        self._names = count(1)
        self._taken: list[int] = []

    @property
    def recorder(self) -> Recording:
        return self.engine.recorder

    @property
    def is_busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    @property
    def num_taken(self) -> int:
        """Blocks that `shrink` has taken out of the pool."""
        return len(self._taken)

    def submit(
        self, prompt: str, max_tokens: int = 16, priority: int = 0, n: int = 1, temperature: float = 0.0
    ) -> str:
        """Queue a prompt; returns the request's id. Several continuations are drawn, so they need a temperature."""
        if not prompt:
            raise ValueError("the prompt is empty — type a few words first.")
        if n > 1 and temperature == 0:
            temperature = 1.0
        params = SamplingParams(n=n, temperature=temperature, max_tokens=max_tokens)
        request_id = f"r{next(self._names)}"
        self.engine.add_request(request_id, self.llm.prompt_tokens(prompt), params, priority=priority)
        return request_id

    def step(self) -> bool:
        """One step of the engine; False if there was nothing to do."""
        if not self.is_busy:
            return False
        for output in self._outputs():
            for answer in output.outputs:
                name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{answer.index}"
                self.texts[name] = answer.text
        return True

    def fork(self, request_id: str) -> str:
        """A request that owns every block so far as well, and goes on by itself, sampled, so that it differs."""
        self._check_served(request_id)
        number = next(self._names)
        child = f"{request_id}-fork{number}"
        self.engine.fork(request_id, child, temperature=1.0, seed=number)
        return child

    def abort(self, request_id: str) -> None:
        """End a request, and with it the other continuations of its prompt."""
        self._check_served(request_id)
        is_alone = request_id in self.engine.request_ids()
        self.engine.abort(request_id if is_alone else request_id.rpartition("/")[0])

    def shrink(self, num_blocks: int) -> None:
        """Take free blocks out of the pool, as if others needed the memory; a negative number gives them back."""
        if num_blocks < 0:
            back = self._taken[num_blocks:]
            if not back:
                raise ValueError("no blocks were taken out of the pool.")
            del self._taken[num_blocks:]
            self.engine.pool.free(back)
            return
        if num_blocks > self.engine.pool.num_free:
            free = self.engine.pool.num_free
            raise ValueError(f"{num_blocks} blocks asked for, {free} are free — step on, or abort a request first.")
        taken = self.engine.pool.allocate(num_blocks)
        self.engine.scheduler.prefix_cache.forget(taken)
        self._taken += taken

    def _outputs(self) -> list[Any]:
        """The engine counts on its whole pool; with blocks taken away it may find nobody to serve, and break off."""
        try:
            return self.engine.step()
        except Exception:
            if self._taken and not self.recorder.at().scheduled:
                raise ValueError("nobody fits into what is left of the pool — give blocks back, or abort.") from None
            raise

    def _check_served(self, request_id: str) -> None:
        if request_id not in self.recorder.at().requests:
            raise ValueError(f"request {request_id!r} is not being served — choose one that waits or runs.")
