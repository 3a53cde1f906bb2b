"""Exercises of notebook 01: KV bytes, holes that must merge, a token too many, seats that idle."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from labcore.course.learner.exercise import (
    BugHunt,
    Exercise,
    Mismatch,
    expect,
    expect_attributes,
    expect_equal,
    expect_raises,
)
from labcore.recorder import Span


def check_kv_bytes(kv_bytes_per_token: Any) -> None:
    got = kv_bytes_per_token(1, 1, 1, 1)
    expect(got != 1, "one layer, one KV head, head_dim 1, one byte a number: got 1",
           "2: the token leaves a key and a value behind", hint=1)  # fmt: skip
    expect_equal(got, 2, "one layer, one KV head, head_dim 1, one byte a number")
    for shape, name in (((30, 3, 64, 4), "SmolLM2-135M in float32"), ((32, 8, 128, 2), "Llama-3.1-8B in bfloat16")):
        layers, heads, dim, size = shape
        got = kv_bytes_per_token(*shape)
        expect(got != 2 * heads * dim * size, f"{name}: {show_bytes(got)} is what one layer takes",
               "the sum over all layers", hint=2)  # fmt: skip
        expect_equal(got, 2 * layers * heads * dim * size, f"{name}: {layers} layers, {heads} KV heads, head_dim {dim}, "
                     f"{size} bytes a number", hint=2)  # fmt: skip


def show_bytes(value: Any) -> str:
    return f"{value:,} bytes" if isinstance(value, int) else repr(value)


def check_free(RegionAllocator: Any) -> None:
    expect_attributes(RegionAllocator, "allocate", "free", "num_free", "largest_hole")

    def four_of_three() -> tuple[Any, list[Any]]:
        allocator = RegionAllocator(12)
        return allocator, [allocator.allocate(3) for _ in range(4)]

    allocator, (a, b, c, d) = four_of_three()
    allocator.free(b)
    expect_equal((allocator.num_free, allocator.largest_hole), (3, 3), "one of four regions of 3 slots was freed: "
                 "(num_free, largest_hole)")  # fmt: skip
    allocator.free(d)
    expect_equal(allocator.largest_hole, 3, "b and d were freed, and c still lies between them: largest_hole", hint=3)
    expect_raises(RuntimeError, lambda: allocator.allocate(4), "allocate(4) with holes of 3 and 3 slots", hint=3)
    _expect_reach(*four_of_three(), order=(1, 0), size=6, what="the freed region ends where a hole begins")
    _expect_reach(*four_of_three(), order=(1, 2), size=6, what="the freed region begins where a hole ends")
    _expect_reach(*four_of_three(), order=(0, 2, 1), size=9, what="the freed region has a hole on either side")
    allocator, regions = four_of_three()
    for i in (2, 0):
        allocator.free(regions[i])
    got = allocator.allocate(3)
    expect_equal(got.start, 0, "c and then a were freed; first fit takes the lowest hole, so allocate(3) starts at", hint=3)
    for order in permutations(range(4)):
        _expect_reach(*four_of_three(), order=order, size=12, what="everything was freed")
    allocator, regions = four_of_three()
    allocator.free(regions[1])
    expect_raises(ValueError, lambda: allocator.free(regions[1]), "the same region was freed twice")
    expect_equal(allocator.num_free, 3, "after the refused second free: num_free")


def _expect_reach(allocator: Any, regions: list[Any], order: tuple[int, ...], size: int, what: str) -> None:
    """Free the regions in this order; the free slots are neighbours now, and must be usable as one hole."""
    for i in order:
        allocator.free(regions[i])
    said = f"a, b, c, d hold 3 slots each; {what} (freed in the order {', '.join('abcd'[i] for i in order)})"
    expect_equal((allocator.num_free, allocator.largest_hole), (size, size), f"{said}: (num_free, largest_hole)", hint=2)
    try:
        allocator.allocate(size)
    except RuntimeError as error:
        raise Mismatch(f"{said}, and allocate({size}) said “{error}”", f"the {size} free slots in a row", 2) from error


def check_neighbour(Cache: Any) -> None:
    import torch

    from labcore.models.layers import LayerShape

    expect_attributes(Cache, "extend")

    def ana_and_bo() -> tuple[Any, Any, Any]:
        cache = Cache([LayerShape(2, 2, 4)] * 2, num_slots=12)
        for buffer in (*cache.k, *cache.v):
            buffer.fill_(-1.0)
        return cache, cache.allocator.allocate(4), cache.allocator.allocate(4)

    def tokens(first: int, count: int) -> Any:
        return torch.arange(first, first + count).float()[None, :, None].expand(2, count, 4).contiguous()

    cache, ana, _ = ana_and_bo()
    for i in range(4):
        try:
            keys, values = cache.extend(1, ana, i, tokens(i, 1), 10 + tokens(i, 1))
        except RuntimeError as error:
            raise Mismatch(f"Ana has reserved 4 slots and stores {i}; token {i + 1} was refused: {error}",
                           "her region to take 4 tokens", 3) from error  # fmt: skip
        expect_equal(tuple(keys.shape), (2, i + 1, 4), f"extend returned keys of all {i + 1} tokens so far: their shape")
    expect_equal(keys, tokens(0, 4), "Ana's four keys, read back")
    expect_equal(values, 10 + tokens(0, 4), "Ana's four values, read back")
    for stored, new in ((4, 1), (3, 2), (0, 5), (2, 6)):
        cache, ana, bo = ana_and_bo()
        cache.extend(0, bo, 0, tokens(70, 4), tokens(80, 4))
        if stored:
            cache.extend(0, ana, 0, tokens(0, stored), tokens(10, stored))
        before = [buffer.clone() for buffer in (*cache.k, *cache.v)]
        said = f"Ana's region has 4 slots and {stored} tokens; {new} more were written"
        refused = False
        try:
            cache.extend(0, ana, stored, tokens(50, new), tokens(60, new))
        except RuntimeError:
            refused = True
        for buffer, old in zip((cache.k[0], cache.v[0]), (before[0], before[2]), strict=True):
            expect(torch.equal(buffer[bo.start : bo.start + 4], old[bo.start : bo.start + 4]),
                   f"{said}, and Bo's first token changed", "Bo's slots to be his alone", hint=2)  # fmt: skip
        expect(refused, f"{said}, and nobody objected", "OutOfSlots to be raised: the tokens don't fit", hint=2)
        same = all(torch.equal(buffer, old) for buffer, old in zip((*cache.k, *cache.v), before, strict=True))
        expect(same, f"{said}: refused, but some of them had been written first", "nothing to change", hint=3)


def check_utilization(utilization: Any) -> None:
    def about(spans: list[Span], expected: float, what: str, hint: int) -> None:
        got = float(utilization(spans))
        expect(0 <= got <= 1, f"{what}: got {got:g}", "a share, from 0 to 1", hint=1)
        expect(abs(got - expected) < 1e-6, f"{what}: got {got:.3f}", f"{expected:.3f}", hint=hint)

    ana = [Span("ana", 0, 1, "prefill"), Span("ana", 1, 4, "decode")]
    bo = [Span("bo", 0, 1, "prefill"), Span("bo", 1, 2, "decode"), Span("bo", 2, 4, "idle")]
    cy = [Span("cy", 0, 4, "waiting"), Span("cy", 4, 5, "prefill")]
    about(ana, 1.0, "Ana alone: 1 step of prefill, 3 of decode", hint=2)
    about(ana + bo, 6 / 8, "Ana works for 4 steps; Bo for 2, and then he idles for 2", hint=2)
    about(ana + bo + cy, 7 / 9, "Cy waits for 4 steps, without a seat, and works for 1", hint=3)
    about([Span("di", 0, 2, "prefill"), Span("di", 2, 2.5, "decode"), Span("di", 2.5, 10, "idle")], 0.25,
          "spans of unequal length: 2 steps of prefill, ½ of decode, 7½ idle", hint=1)  # fmt: skip


EXERCISES = (
    Exercise(
        id="01.kv_bytes",
        title="what one token costs",
        minutes=4,
        difficulty=1,
        spec="`kv_bytes_per_token(num_layers, num_kv_heads, head_dim, dtype_bytes)` returns the bytes of KV cache that one "
        "token takes in the whole model.",
        check=check_kv_bytes,
        passed="46,080 bytes for a token of SmolLM2, 131,072 for one of an 8B.",
        hints=(
            "Which two vectors does a token leave behind for those who come later?",
            "Each layer keeps its own pair of vectors, and so does each KV head in it; a vector has head_dim numbers.",
        ),
        reference="baseline.naive.kv_bytes_per_token",
    ),
    Exercise(
        id="01.free",
        title="holes that touch are one hole",
        minutes=12,
        difficulty=2,
        spec="`free(region)` turns the region into a hole. `holes` stays in order of `start`, and no two holes in it touch. A "
        "region that is not allocated raises ValueError and changes nothing (that part is written).",
        check=check_free,
        passed="all 24 orders of leaving end in one hole.",
        hints=(
            "Put the region among the holes first, in order of start; mend what touches afterwards.",
            "Walk through the ordered holes and build a new list: does the next one begin where the last one in it stops?",
            "Only holes that touch become one: compare stop with start, and keep the list in order, first fit relies on it.",
        ),
        reference="baseline.naive.RegionAllocator",
        methods=("free",),
    ),
    BugHunt(
        id="01.neighbour",
        title="bug hunt: Bo's first word changed",
        minutes=10,
        difficulty=2,
        spec="`extend` writes T tokens behind the `num_stored` that are there, and returns all so far. If they don't fit the "
        "region, it raises OutOfSlots and writes nothing.",
        check=check_neighbour,
        passed="Ana's region takes its last token and not one more; Bo never notices her.",
        hints=(
            "Which slot does Ana's fifth token go to? Who lives there?",
            "The test looks at where the new tokens begin. What of where they end?",
            "A region of 4 takes a fourth token, and refuses a fifth before any of it is written.",
        ),
        reference="baseline.naive.ContiguousCache",
        methods=("extend",),
        planted="course.exercises.nb01_planted.CarelessCache",
        seen_in="gittensor-ai-lab/sparkinfer#110",
    ),
    Exercise(
        id="01.utilization",
        title="how busy are the seats",
        minutes=8,
        difficulty=2,
        spec="`utilization(spans)` returns the share of the seats' time, from 0 to 1, that is work: prefill and decode, "
        "against those and idle. Who is waiting has no seat yet.",
        check=check_utilization,
        passed="prefill and decode over all the time that seats are held.",
        hints=(
            "A span lasts from start to stop: add up time, don't count spans.",
            "Idle time belongs below the line and not above it.",
            "Waiting happens outside of the batch: it belongs neither above nor below the line.",
        ),
        reference="baseline.naive.utilization",
    ),
)
