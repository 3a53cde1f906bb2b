"""Engine control: the operations of the explorer without widgets. Submit, step, fork, abort, shrink the pool."""

from __future__ import annotations

from itertools import count
from typing import Any

from labcore.recorder import Recording
from labcore.sampling_params import SamplingParams


class EngineControl:
    """Operates one recording engine. A method that raises ValueError has changed nothing.

    llm   an `LLM` with record=True
    """

    def __init__(self, llm: Any) -> None:
        if not isinstance(llm.engine.recorder, Recording):
            raise ValueError("this llm keeps no flight record — create it with LLM(…, record=True).")
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
        """Blocks taken out of the pool by `shrink`."""
        return len(self._taken)

    def submit(
        self, prompt: str, max_tokens: int = 16, priority: int = 0, n: int = 1, temperature: float = 0.0
    ) -> str:
        """Add a request and return its id. With n > 1 a temperature of 0 becomes 1, so that the samples differ."""
        if self.llm.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it takes no text — use engine.add_request() with token ids.")
        if not prompt:
            raise ValueError("the prompt is empty — type a few words first.")
        if n > 1 and temperature == 0:
            temperature = 1.0
        params = SamplingParams(n=n, temperature=temperature, max_tokens=max_tokens)
        request_id, _ = self._free_name("r")
        self.engine.add_request(request_id, self.llm.prompt_tokens(prompt), params, priority=priority)
        return request_id

    def step(self) -> bool:
        """Run one engine step; False if there is no unfinished request."""
        if not self.is_busy:
            return False
        for output in self._outputs():
            for answer in output.outputs:
                name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{answer.index}"
                self.texts[name] = answer.text
        return True

    def fork(self, request_id: str) -> str:
        """Fork a request: the child shares all its blocks and continues with its own seed and temperature 1."""
        self._check_served(request_id)
        child, number = self._free_name(f"{request_id}-fork")
        self.engine.fork(request_id, child, temperature=1.0, seed=number)
        return child

    def abort(self, request_id: str) -> None:
        """Abort a request, with all samples or beams of its prompt."""
        self._check_served(request_id)
        is_alone = request_id in self.engine.request_ids()
        self.engine.abort(request_id if is_alone else request_id.rpartition("/")[0])

    def shrink(self, num_blocks: int) -> None:
        """Take free blocks out of the pool, to simulate memory pressure; a negative number returns them."""
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
        self._taken += self.engine.scheduler.kv.allocate(num_blocks)

    def _free_name(self, stem: str) -> tuple[str, int]:
        """The next name that no unfinished request has, of this session or of one before it, and its number."""
        served = self.engine.request_ids()
        number = next(number for number in self._names if f"{stem}{number}" not in served)
        return f"{stem}{number}", number

    def _outputs(self) -> list[Any]:
        """Run a step; with blocks taken out of the pool the engine may fail, because no request fits."""
        try:
            return self.engine.step()
        except Exception:
            if self._taken and not self.recorder.at().scheduled:
                raise ValueError("no request fits into the remaining blocks — give blocks back, or abort.") from None
            raise

    def _check_served(self, request_id: str) -> None:
        if request_id not in self.recorder.at().requests:
            raise ValueError(f"request {request_id!r} is not being served — choose a waiting or running one.")
