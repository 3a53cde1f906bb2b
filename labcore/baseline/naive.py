"""The KV cache before paging: one contiguous region a request, and batches that wait for their slowest member.

Built in notebooks 01 and 04, to be beaten by the rest of the course. Three ideas, each a few lines:

    no cache      every new token recomputes the whole text                   generate_without_cache
    contiguous    K and V are kept, in one unbroken region per request,       RegionAllocator, ContiguousCache,
                  reserved for the longest text it could ever become          contiguous_attention, generate
    static batch  requests start together and leave together                  static_batches
    naive steps   in and out at every step, and no answer to an empty pool    NaiveScheduler (notebook 04)

    slab     0         8        16        24         ana may grow to 8 tokens and so holds 8 slots from the start;
             │ ana·····│ bo··   │ cy······│          the dots are reserved and empty. When bo leaves, an 8-token
             └─ region ┴────────┴─────────┘          hole stays between ana and cy: useless to anyone who asks for 9.

Regions, batches in steps and the shares of waste are plain arithmetic; only the cache and `generate` need torch.
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
    """Greedy tokens for one prompt, the whole text sent through the model for each of them.

    A prompt of P tokens and N new ones cost P + (P + 1) + … + (P + N - 1) tokens of work: quadratic in the length.
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
    """Bytes of KV cache that one token takes: a key and a value per layer and KV head.

    Query heads don't count: with grouped-query attention several of them read the same KV head.
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
    """Causal attention of one request's newest tokens over all it has so far.

    q: [Hq, T, D], the last T of the L tokens. k, v: [Hkv, L, D]. Returns [Hq, T, D].
    With g = Hq / Hkv, query heads g·h … g·h + g - 1 read KV head h (grouped-query attention).
    sliding_window: tokens that a query sees, itself included. softcap: bound on the size of a score.
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
    """No stretch of slots is as long as what was asked for. Nothing was taken."""


@dataclass(frozen=True, order=True)
class Region:
    """`size` neighbouring slots from `start` on."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class RegionAllocator:
    """Hands out contiguous regions of a slab of slots, first fit.

    `holes` are the free regions, in order of `start`; no two of them touch, so that free space is in as few pieces as
    the living regions allow. It can still be in many: that is external fragmentation.

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
        """Take the front of the first hole that is large enough.

        Raises OutOfSlots, and takes nothing, if no single hole is: even when the holes together would do.
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
        """Make the region a hole again, and one hole with the holes that it touches.

        Raises ValueError, and changes nothing, if a slot of it is free already or lies outside the slab.
        """
        inside = 0 <= region.start < region.stop <= self.num_slots
        if not inside or any(hole.start < region.stop and region.start < hole.stop for hole in self.holes):
            raise ValueError(f"{region} is not allocated: it overlaps a hole, or leaves the slab.")
        merged: list[Region] = []
        for hole in sorted([*self.holes, region]):
            if merged and merged[-1].stop == hole.start:
                before = merged.pop()
                hole = Region(before.start, before.size + hole.size)
            merged.append(hole)
        self.holes = merged


class ContiguousCache:
    """K and V of every layer, in one slab of slots; each request owns one region of it.

    k[layer], v[layer]: [num_slots, num_kv_heads, head_dim]. A request's tokens lie in a row from its region's start, so
    that all it has is one slice of the slab: nothing to look up and nothing to copy. That is what paging gives up.
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
        """Write new tokens behind the region's first `num_stored`, and return keys and values of all tokens so far.

        k, v: [Hkv, T, D]. Returns two views of the slab, [Hkv, num_stored + T, D].
        Raises OutOfSlots, and writes nothing, if the tokens would run over the region's end into a neighbour.
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
    """Where the rows of one batch live, and how far each has come.

    num_stored: tokens of each row in the cache before this pass. num_new: its tokens in this pass; they are the last
    columns of the row, and whatever stands left of them is padding.
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
    """Attention of one layer, as transformers calls it, over the regions of a static batch.

    q: [B, Hq, T, D]; k, v: [B, Hkv, T, D], the new tokens' only. Returns ([B, T, Hq, D], None). Padding is neither
    stored nor attended to; its rows come out as zeros, and nobody reads them.
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
    """Make prompts of many lengths one rectangle: token ids and positions, both [B, longest].

    The padding goes to the left, so that the last column holds every row's newest token. Its id and position are 0 and
    mean nothing.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    positions = [[0] * (longest - len(prompt)) + list(range(len(prompt))) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(positions)


def greedy_step(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, batch: StaticBatch
) -> torch.Tensor:
    """One pass over the new tokens of all rows, which puts them into the cache.

    ids, positions: [B, T]. Returns the likeliest next token of each row, [B, 1], and moves the batch on by one step.
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
    """Greedy tokens for each prompt, computed as one static batch.

    Every request reserves `max_len` slots, whatever it needs. All rows start together; those that are done keep their
    seats and go on being computed until the last one is, which is what makes the batch static.
    A row ends after `max_tokens`, or with the first token in `stop_ids`, which is kept.

    Raises ValueError if a prompt is empty or could outgrow `max_len`, OutOfSlots if the slab can't hold the batch. The
    regions are given back, whatever happens.
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
    """Slots that a request fills, summed over its first `steps` steps.

    In the first step its prompt is stored, in each that follows one token more.
    """
    return steps * request.prompt_tokens + steps * (steps - 1) // 2


def reservation_waste(requests: Sequence[TraceRequest], reserved: int) -> float:
    """Share of what is reserved that holds nothing, over the whole life of the requests.

    Each request holds `reserved` slots for as many steps as it has output tokens. Requests that could never fit are
    left out, as a server would refuse them.
    """
    fitting = [request for request in requests if request.prompt_tokens + request.output_tokens <= reserved]
    filled = sum(slot_steps(request, request.output_tokens) for request in fitting)
    return 1 - filled / sum(reserved * request.output_tokens for request in fitting)


@dataclass(frozen=True)
class Stay:
    """One request's region, and the steps `start` up to, not including, `stop` for which it holds it."""

    request: TraceRequest
    region: Region
    start: int
    stop: int


def pack(requests: Sequence[TraceRequest], num_slots: int, reserve: Callable[[TraceRequest], int]) -> list[Stay]:
    """Serve a log from one slab, as many requests at a time as find a region.

    reserve: how many slots a request asks for. All requests wait from the start, in order; the first in line holds up
    the others until somebody leaves a hole that is large enough for it. A request stays one step per output token.
    Raises OutOfSlots if one of them wouldn't even fit into the empty slab.
    """
    allocator, now, leaving, stays = RegionAllocator(num_slots), 0, [], []
    for request in requests:
        size = reserve(request)
        while allocator.largest_hole < size and leaving:
            now, _, region = heappop(leaving)
            allocator.free(region)
        stay = Stay(request, allocator.allocate(size), now, now + request.output_tokens)
        heappush(leaving, (stay.stop, len(stays), stay.region))
        stays.append(stay)
    return stays


def memory_shares(stays: Sequence[Stay], num_slots: int) -> dict[str, float]:
    """How the slab was used while requests were waiting for it, as shares of its slot-steps.

    "tokens": slots that held one. "reserved": held by a request, and empty. "free": in holes, while somebody waited.
    Counted up to the last admission, since after it nobody waits and holes are no loss; to the end, if nobody ever did.
    """
    end = max(stay.start for stay in stays) or max(stay.stop for stay in stays)
    tokens = held = 0
    for stay in stays:
        steps = min(stay.stop, end) - stay.start
        tokens += slot_steps(stay.request, steps)
        held += steps * stay.region.size
    total = num_slots * end
    return {"tokens": tokens / total, "reserved": (held - tokens) / total, "free": 1 - held / total}


def static_batches(requests: Sequence[TraceRequest], batch_size: int, names: Sequence[str] | None = None) -> list[Span]:
    """Serve a log in static batches: who waits, works and idles when, in steps.

    Requests are taken `batch_size` at a time, in order. A batch starts when its last member has arrived (`arrival`, in
    steps) and the batch before has left, and it leaves when its longest member is done. Until then the others are idle:
    finished, with their seats held. The first step is prefill and gives the first token.
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


def busy_share(spans: Sequence[Span]) -> float:
    """Share of the seats' time that is work (prefill and decode), not idling."""
    time = dict.fromkeys(("prefill", "decode", "idle"), 0.0)
    for span in spans:
        if span.state in time:
            time[span.state] += span.stop - span.start
    return 1 - time["idle"] / sum(time.values())


def padding_share(requests: Sequence[TraceRequest], batch_size: int) -> float:
    """Share of the prompt rectangles that is padding, in static batches."""
    real = padded = 0
    for first in range(0, len(requests), batch_size):
        lengths = [request.prompt_tokens for request in requests[first : first + batch_size]]
        real, padded = real + sum(lengths), padded + max(lengths) * len(lengths)
    return 1 - real / padded


@dataclass(eq=False)
class NaiveRequest:
    """A request as the naive scheduler sees it: how long it is, and the blocks it holds."""

    name: str
    prompt: int
    output: int
    num_tokens: int = 0
    blocks: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.num_tokens == self.prompt + self.output


class NaiveScheduler:
    """In and out at every step, as tutorials have it; its faults are kept, to be beaten.

    It lets a request in while there are blocks for its prompt, and looks no further. When the pool is empty it warns,
    and counts the token all the same; a request larger than the pool blocks the queue for ever; blocks come out of a `set`,
    so that no two processes give the same ones; nobody is preempted, and nobody is more urgent than another.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.free = {f"b{i}" for i in range(num_blocks)}
        self.waiting: list[NaiveRequest] = []
        self.running: list[NaiveRequest] = []
        self.warnings: list[str] = []

    def step(self) -> list[str]:
        """Let in, give each a token, let go. Returns the names of those who gained one."""
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
        """Blocks for the prompt."""
        request.num_tokens = request.prompt
        request.blocks = [self.free.pop() for _ in range(-(-request.prompt // self.block_size))]
        self.running.append(request)

    def grow(self, request: NaiveRequest) -> None:
        """One token more, and a block if the last one is full."""
        request.num_tokens += 1
        if request.num_tokens > len(request.blocks) * self.block_size:
            if self.free:
                request.blocks.append(self.free.pop())
            else:
                self.warnings.append(f"no block left for token {request.num_tokens} of {request.name}")
