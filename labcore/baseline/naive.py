"""The baseline: a contiguous KV cache, one region per request, and static batching.

Built in notebook 01; `NaiveRequest` and `NaiveScheduler` are built in notebook 04.

    no cache              every new token recomputes the whole sequence       generate_without_cache
    contiguous KV cache   one contiguous region per request, reserved for     RegionAllocator, ContiguousCache,
                          its maximum length                                  contiguous_attention, generate
    static batching       requests start and leave together                   static_batches
    naive scheduling      iteration-level, without preemption                 NaiveScheduler

    buffer   0         8        16        24         ana may grow to 8 tokens, so 8 slots are reserved from the start;
             │ ana·····│ bo··   │ cy······│          dots are reserved and empty (internal fragmentation). When bo ends,
             └─ region ┴────────┴─────────┘          its hole serves no request of 9 (external fragmentation).

Allocator, batch simulation and waste are plain arithmetic; only the cache and `generate` need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from labcore.models.layers import LayerShape
from labcore.recorder import Span
from labcore.workload.traces import TraceRequest


@torch.inference_mode()
def generate_without_cache(
    model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """Greedy decoding without a KV cache: each new token is a forward pass over the whole sequence.

    P prompt and N new tokens cost P + (P + 1) + … + (P + N - 1) token forwards: quadratic in the length.
    Ends after `max_tokens`, or with the first token in `stop_ids`, which is kept.
    """
    model.set_attn_implementation("eager")
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        ids = torch.tensor([tokens], device=model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of KV cache per token: a key and a value per layer and KV head.

    Query heads don't count: in grouped-query attention several share a KV head.
    """
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of one request's newest tokens over all its tokens.

    q: [Hq, T, D], the last T of the L tokens. k, v: [Hkv, L, D]. Returns [Hq, T, D].
    With g = Hq / Hkv, query heads g·h … g·h + g - 1 read KV head h (grouped-query attention).
    sliding_window: tokens that a query sees, itself included. softcap: bound on the absolute score.
    """
    num_kv_heads, num_tokens, _ = k.shape
    q = q.unflatten(0, (num_kv_heads, -1))
    scores = (q @ k[:, None].transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(num_tokens, device=q.device)
    age = position[-q.shape[2] :, None] - position
    hidden = age < 0 if sliding_window is None else (age < 0) | (age >= sliding_window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v[:, None]).flatten(0, 1)


class OutOfSlots(RuntimeError):
    """No hole is large enough. Nothing was allocated."""


@dataclass(frozen=True, order=True)
class Region:
    """`size` contiguous slots from `start`."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class RegionAllocator:
    """First-fit allocator of contiguous regions in a buffer of slots.

    `holes` are the free regions, sorted by `start`; adjacent holes are merged. Free space may still be scattered over
    many holes: external fragmentation.

        ana ana ana  ·  bo bo  ·  ·  cy cy cy cy        3 slots free, and no room for 3 in a row
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots!r}; it must be at least 1.")
        self.num_slots = num_slots
        self.holes = [Region(0, num_slots)]

    @property
    def num_free(self) -> int:
        return sum(hole.size for hole in self.holes)

    @property
    def largest_hole(self) -> int:
        return max((hole.size for hole in self.holes), default=0)

    def allocate(self, size: int) -> Region:
        """Allocate the front of the first hole of at least `size` slots.

        Raises OutOfSlots, and changes nothing, if no single hole is large enough.
        """
        if size < 1:
            raise ValueError(f"size is {size!r}; it must be at least 1.")
        for index, hole in enumerate(self.holes):
            if hole.size >= size:
                rest = Region(hole.start + size, hole.size - size)
                self.holes[index : index + 1] = [rest] if rest.size else []
                return Region(hole.start, size)
        raise OutOfSlots(
            f"{size} slots in a row were asked for; {self.num_free} are free, "
            f"the largest hole has {self.largest_hole}."
        )

    def free(self, region: Region) -> None:
        """Free a region and merge it with adjacent holes.

        Raises ValueError, and changes nothing, if a slot of it is free or outside the buffer.
        """
        inside = 0 <= region.start < region.stop <= self.num_slots
        if not inside or any(hole.start < region.stop and region.start < hole.stop for hole in self.holes):
            raise ValueError(f"{region} is not allocated: it overlaps a hole, or leaves the buffer.")
        merged: list[Region] = []
        for hole in sorted([*self.holes, region]):
            if merged and merged[-1].stop == hole.start:
                before = merged.pop()
                hole = Region(before.start, before.size + hole.size)
            merged.append(hole)
        self.holes = merged


class ContiguousCache:
    """K and V of every layer in one buffer of slots; each request owns one region of it.

    k[layer], v[layer]: [num_slots, num_kv_heads, head_dim]. A request's tokens are contiguous from the start of its
    region, so its K and V are a slice of the buffer: no lookup, no gather. Paging gives that up.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.allocator = RegionAllocator(num_slots)
        shapes = [(num_slots, layer.num_kv_heads, layer.head_dim) for layer in layers]
        self.k = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    def extend(
        self, layer: int, region: Region, num_stored: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens after the region's first `num_stored`; returns the keys and values of all its tokens.

        k, v: [Hkv, T, D]. Returns two views of the buffer, [Hkv, num_stored + T, D].
        Raises OutOfSlots, and writes nothing, if the region is too small.
        """
        first, stop = region.start + num_stored, region.start + num_stored + k.shape[1]
        if stop > region.stop:
            raise OutOfSlots(f"{stop - region.start} tokens in a region of {region.size} slots: reserve more.")
        self.k[layer][first:stop] = k.transpose(0, 1)
        self.v[layer][first:stop] = v.transpose(0, 1)
        return (
            self.k[layer][region.start : stop].transpose(0, 1),
            self.v[layer][region.start : stop].transpose(0, 1),
        )


@dataclass
class StaticBatch:
    """The regions of a batch's rows and the state of each row.

    num_stored: tokens of each row in the cache before this pass. num_new: its tokens in this pass, in the row's last
    columns; the columns to their left are padding.
    """

    cache: ContiguousCache
    regions: list[Region]
    num_stored: list[int]
    num_new: list[int]


def contiguous_attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    static_batch: StaticBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the regions of a static batch; transformers' attention interface.

    q: [B, Hq, T, D]; k, v: [B, Hkv, T, D], of the new tokens. Returns ([B, T, Hq, D], None). Padding is neither stored
    nor attended to; its outputs are zeros.
    """
    if s_aux is not None:
        raise ValueError("the model's attention has sinks (s_aux), which this cache can't serve: use LLM.")
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    batch, out = static_batch, torch.zeros_like(q)
    for row, (region, stored, new) in enumerate(zip(batch.regions, batch.num_stored, batch.num_new)):
        queries, k_new, v_new = q[row, :, -new:], k[row, :, -new:], v[row, :, -new:]
        keys, values = batch.cache.extend(module.layer_idx, region, stored, k_new, v_new)
        out[row, :, -new:] = attend(
            queries, keys, values, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        )
    return out.transpose(1, 2), None


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pad prompts to token ids and positions, both [B, longest].

    The last column holds every row's newest token. Padding has id 0 and position 0; both are ignored.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    positions = [[0] * (longest - len(prompt)) + list(range(len(prompt))) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(positions)


def greedy_step(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, batch: StaticBatch
) -> torch.Tensor:
    """One forward pass over the new tokens of all rows; writes their K and V to the cache.

    ids, positions: [B, T]. Returns the likeliest next token of each row, [B, 1], and advances the batch by one step.
    """
    out = model(
        input_ids=ids, position_ids=positions, static_batch=batch,
        attention_mask=None, use_cache=False, logits_to_keep=1,
    )  # fmt: skip
    batch.num_stored = [stored + new for stored, new in zip(batch.num_stored, batch.num_new)]
    batch.num_new = [1] * len(batch.num_new)
    return out.logits[:, -1:].argmax(-1)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    cache: ContiguousCache,
    max_len: int,
    stop_ids: Collection[int] = (),
) -> list[list[int]]:
    """Greedy decoding of all prompts as one static batch.

    Every request reserves `max_len` slots. All rows start together; finished rows stay in the batch, and are computed,
    until the last row is finished. A row ends after `max_tokens`, or with the first token in `stop_ids`, which is kept.

    Raises ValueError if a prompt is empty or could exceed `max_len`, OutOfSlots if the buffer can't hold the batch. All
    regions are freed in any case.
    """
    lengths, room = [len(prompt) for prompt in prompts], max_len - max_tokens
    if not all(1 <= length <= room for length in lengths):
        raise ValueError(f"prompts have {lengths} tokens; max_len - max_tokens leaves room for 1 to {room}.")

    def done(row: list[int]) -> bool:
        return len(row) == max_tokens or (len(row) > 0 and row[-1] in stop_ids)

    AttentionInterface.register("labcore_contiguous", contiguous_attention)
    model.set_attn_implementation("labcore_contiguous")
    ids, positions = (rectangle.to(model.device) for rectangle in pad_left(prompts))
    batch, rows = StaticBatch(cache, [], [0] * len(prompts), lengths), [[] for _ in prompts]
    try:
        for _ in prompts:
            batch.regions.append(cache.allocator.allocate(max_len))
        while not all(map(done, rows)):
            ids, positions = greedy_step(model, ids, positions, batch), positions[:, -1:] + 1
            for row, token in zip(rows, ids[:, 0].tolist()):
                if not done(row):
                    row.append(token)
    finally:
        for region in batch.regions:
            cache.allocator.free(region)
    return rows


def slot_steps(request: TraceRequest, steps: int) -> int:
    """Slots filled by a request, summed over its first `steps` steps.

    The first step stores the prompt, each later step one token more.
    """
    return steps * request.prompt_tokens + steps * (steps - 1) // 2


def reservation_waste(requests: Sequence[TraceRequest], reserved: int) -> float:
    """Internal fragmentation: the share of reserved slot-steps that hold no token.

    Each request reserves `reserved` slots for one step per output token. Requests longer than that are left out.
    """
    fitting = [request for request in requests if request.prompt_tokens + request.output_tokens <= reserved]
    filled = sum(slot_steps(request, request.output_tokens) for request in fitting)
    return 1 - filled / sum(reserved * request.output_tokens for request in fitting)


@dataclass(frozen=True)
class Residency:
    """A request's region and the steps [start, stop) for which it holds it."""

    request: TraceRequest
    region: Region
    start: int
    stop: int


def simulate_first_fit(
    requests: Sequence[TraceRequest], num_slots: int, reserve: Callable[[TraceRequest], int]
) -> list[Residency]:
    """Simulate serving a log from one buffer with first-fit allocation.

    reserve: slots that a request reserves. All requests arrive at step 0 and are admitted in order: the head of the
    queue blocks the rest until a hole is large enough for it. A request holds its region one step per output token.
    Raises OutOfSlots if a request doesn't fit the empty buffer.
    """
    allocator, now, leaving, residencies = RegionAllocator(num_slots), 0, [], []
    for request in requests:
        size = reserve(request)
        while allocator.largest_hole < size and leaving:
            now, _, region = heappop(leaving)
            allocator.free(region)
        residency = Residency(request, allocator.allocate(size), now, now + request.output_tokens)
        heappush(leaving, (residency.stop, len(residencies), residency.region))
        residencies.append(residency)
    return residencies


def memory_breakdown(residencies: Sequence[Residency], num_slots: int) -> dict[str, float]:
    """Breakdown of the buffer's slot-steps while requests wait, as shares that sum to 1.

    "tokens": slots that hold a token. "reserved": reserved and empty (internal fragmentation). "free": in holes
    (external fragmentation). Counted up to the last admission, or to the end if no request ever waited.
    """
    end = max(residency.start for residency in residencies) or max(residency.stop for residency in residencies)
    tokens = held = 0
    for residency in residencies:
        steps = min(residency.stop, end) - residency.start
        tokens += slot_steps(residency.request, steps)
        held += steps * residency.region.size
    total = num_slots * end
    return {"tokens": tokens / total, "reserved": (held - tokens) / total, "free": 1 - held / total}


def static_batches(requests: Sequence[TraceRequest], batch_size: int, names: Sequence[str] | None = None) -> list[Span]:
    """Simulate static batching: the spans in which each request waits, prefills, decodes and idles, in steps.

    Batches of `batch_size` requests, in order. A batch starts when its last request has arrived (`arrival`, in steps)
    and the previous batch has ended; it ends with its longest request. Until then finished requests idle in the batch.
    The first step is prefill and yields the first token.
    """
    names = names or [f"r{index}" for index in range(len(requests))]
    spans: list[Span] = []
    start = 0
    for first in range(0, len(requests), batch_size):
        batch = list(zip(names, requests))[first : first + batch_size]
        start = max([start, *(request.arrival for _, request in batch)])
        leave = start + max(request.output_tokens for _, request in batch)
        for name, request in batch:
            done = start + request.output_tokens
            times = [request.arrival, start, start + 1, done, leave]
            states = ["waiting", "prefill", "decode", "idle"]
            spans += [Span(name, a, b, state) for a, b, state in zip(times, times[1:], states) if a < b]
        start = leave
    return spans


def utilization(spans: Sequence[Span]) -> float:
    """Batch utilization: prefill and decode time as a share of prefill, decode and idle time."""
    time = dict.fromkeys(("prefill", "decode", "idle"), 0.0)
    for span in spans:
        if span.state in time:
            time[span.state] += span.stop - span.start
    return 1 - time["idle"] / sum(time.values())


def padding_share(requests: Sequence[TraceRequest], batch_size: int) -> float:
    """Share of padding in the prefill of static batches."""
    real = padded = 0
    for first in range(0, len(requests), batch_size):
        lengths = [request.prompt_tokens for request in requests[first : first + batch_size]]
        real, padded = real + sum(lengths), padded + max(lengths) * len(lengths)
    return 1 - real / padded


@dataclass(eq=False)
class NaiveRequest:
    """A request of the naive scheduler: its lengths and its blocks."""

    name: str
    prompt: int
    output: int
    num_tokens: int = 0
    blocks: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.num_tokens == self.prompt + self.output


class NaiveScheduler:
    """Iteration-level scheduling as in tutorials, with its faults.

    Admission looks at the prompt's blocks only. When the pool is empty, it warns and counts the token without a block;
    a request larger than the pool blocks the queue forever; blocks come from a `set`, so block ids differ between
    processes; there is no preemption and no priority.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.free = {f"b{i}" for i in range(num_blocks)}
        self.waiting: list[NaiveRequest] = []
        self.running: list[NaiveRequest] = []
        self.warnings: list[str] = []

    def step(self) -> list[str]:
        """Admit, add one token to each running request, free the finished ones. Returns the names that got a token."""
        while self.waiting and -(-self.waiting[0].prompt // self.block_size) <= len(self.free):
            self.admit(self.waiting.pop(0))
        for request in self.running:
            self.grow(request)
        gained = [request.name for request in self.running]
        for request in [request for request in self.running if request.done]:
            self.free |= set(request.blocks)
            self.running.remove(request)
        return gained

    def admit(self, request: NaiveRequest) -> None:
        """Allocate blocks for the prompt."""
        request.num_tokens = request.prompt
        request.blocks = [self.free.pop() for _ in range(-(-request.prompt // self.block_size))]
        self.running.append(request)

    def grow(self, request: NaiveRequest) -> None:
        """Add a token, and a block if the last one is full."""
        request.num_tokens += 1
        if request.num_tokens > len(request.blocks) * self.block_size:
            if self.free:
                request.blocks.append(self.free.pop())
            else:
                self.warnings.append(f"no block left for token {request.num_tokens} of {request.name}")
