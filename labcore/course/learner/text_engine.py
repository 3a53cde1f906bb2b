"""An engine without a model: the real scheduler, pool and prefix cache over a simulated KV cache of text.

A token is a letter. Each slot stores the prefix that its KV was computed from, so that a read of another text's KV, or
of KV that was never computed, is detected and reported with the request's id:

    engine = TextEngine(HashedPrefixCache, num_blocks=12)
    engine.submit("ana", "the sea is calm")
    engine.run()                        {"ana": "q"}
    engine.foreign_reads                  [] or ["cy's letter 3 reads 'the sea ', should read 'the '"]

The next token is a function of the values read, so that foreign KV changes the output, as in a model.
"""

from __future__ import annotations

from string import ascii_lowercase
from zlib import crc32

from labcore.engine.invariants import check_integrity
from labcore.kvcache.blocks import BlockPool
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import HashedPrefixCache, PrefixCache
from labcore.recorder import Recorder
from labcore.request import Request
from labcore.sampling_params import SamplingParams
from labcore.scheduler.chunking import ChunkedPrefill, ChunkPolicy
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.policy import FirstComeFirstServed
from labcore.scheduler.preemption import Recompute
from labcore.scheduler.scheduler import Scheduler

MAX_STEPS = 2000


class TextEngine:
    """Serves texts step by step.

    prefix_cache   class or instance
    num_blocks, block_size, budget   of pool and scheduler
    chunking       ChunkPolicy; None chunks prompts without limits
    foreign_reads  reads of KV that belongs to another text, in words; empty if there were none
    computed       letters computed so far
    recorder       the flight record
    """

    def __init__(
        self,
        prefix_cache: PrefixCache | type[PrefixCache] = HashedPrefixCache,
        *,
        num_blocks: int = 12,
        block_size: int = 4,
        budget: int = 64,
        chunking: ChunkPolicy | None = None,
    ) -> None:
        cache = prefix_cache(block_size) if isinstance(prefix_cache, type) else prefix_cache
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            KVCacheManager(self.pool, cache),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            chunking=ChunkedPrefill() if chunking is None else chunking,
            preemption=Recompute(),
            policy=FirstComeFirstServed(),
            watermark=0,
        )
        self.recorder = Recorder(num_blocks, block_size, hash_of=cache.hash_of, decode=spelled)
        self.memory: dict[int, str] = {}
        self.requests: dict[str, Request] = {}
        self.submitted: list[Request] = []
        self.foreign_reads: list[str] = []
        self.computed = 0

    def submit(self, name: str, text: str, output: int = 1) -> Request:
        """Queue a text of which `output` more letters are to be generated.

        Raises ValueError, and queues nothing, for a name in use, and a text that is empty or that the pool can't hold.
        """
        params = SamplingParams(max_tokens=output)
        if name in self.requests:
            raise ValueError(f"name is {name!r}, which is in use; give each unfinished text a name of its own.")
        room = self.pool.num_blocks * self.pool.block_size - output + 1  # the last letter needs no KV
        if not 1 <= len(text) <= room:
            raise ValueError(f"text has {len(text)} letters; with {output} to follow it must have 1 … {room}.")
        request = Request(name, [ord(letter) for letter in text], params, len(self.submitted), output, seed=0)
        self.requests[name] = request
        self.submitted.append(request)
        self.scheduler.add(request)
        self.recorder.added(request)
        return request

    def step(self) -> SchedulerOutput:
        """Run one step: schedule, copy blocks, write and read KV, sample, check invariants."""
        self.recorder.begin_step()
        plan = self.scheduler.schedule()
        batch = [(self.requests[name], n) for name, n in plan.num_scheduled_tokens.items()]
        self.recorder.scheduled(plan, [request for request, _ in batch])
        self._copy(plan)
        for request, n in batch:
            self._write(request, n)
        seen = {request.request_id: self._read(request) for request, _ in batch}
        for request, n in batch:
            self.scheduler.commit(request, n)
            if request.num_uncomputed_tokens == 0:
                self._say(request, seen[request.request_id])
        self.recorder.end_step(self.pool)
        check_integrity(self.scheduler, self.requests.values())
        return plan

    def run(self) -> dict[str, str]:
        """Step until all requests are finished; returns the output of each. Raises RuntimeError after MAX_STEPS steps."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_unfinished_requests():
                return {request.request_id: spelled(request.output_token_ids) for request in self.submitted}
            self.step()
        raise RuntimeError(f"{len(self.requests)} requests are unfinished after {MAX_STEPS} steps.")

    def _copy(self, plan: SchedulerOutput) -> None:
        size = self.pool.block_size
        for source, copy in plan.block_copies:
            for i in range(size):
                self.memory[copy * size + i] = self.memory.get(source * size + i, "")

    def _write(self, request: Request, n: int) -> None:
        """Store the KV of n more letters: for each the text up to it."""
        text, done = self._text(request), request.num_computed_tokens
        slots = request.table.slot_mapping(done, done + n)
        self.memory.update((slot, text[: done + i + 1]) for i, slot in enumerate(slots))
        self.computed += n

    def _read(self, request: Request) -> list[str]:
        """Read the request's slots: for each letter the text that its KV was computed from."""
        text, seen = self._text(request), [self.memory.get(slot, "") for slot in request.table.slot_mapping()]
        wrong = next((i for i, found in enumerate(seen) if found != text[: i + 1]), None)
        if wrong is not None:
            found = f"'{seen[wrong]}'" if seen[wrong] else "nothing"
            self.foreign_reads.append(
                f"{request.request_id}'s letter {wrong} reads {found}, should read '{text[: wrong + 1]}'"
            )
        return seen

    def _say(self, request: Request, seen: list[str]) -> None:
        letter = ascii_lowercase[crc32("|".join(seen).encode()) % 26]
        request.output_token_ids.append(ord(letter))
        self.recorder.sampled(request, ord(letter))
        if len(request.output_token_ids) == request.max_tokens:
            request.finish_reason = "length"
            self.recorder.finished(request)
            self.scheduler.finish(request)
            del self.requests[request.request_id]

    @staticmethod
    def _text(request: Request) -> str:
        return spelled(request.token_ids(0, request.num_tokens))


def spelled(token_ids: list[int]) -> str:
    """Token ids as the letters that they stand for."""
    return "".join(map(chr, token_ids))
