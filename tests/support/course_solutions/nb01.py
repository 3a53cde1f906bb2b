"""Right and wrong answers to the exercises of notebook 01: what the checks must accept and must refuse."""

from __future__ import annotations

from labcore.baseline.naive import ContiguousCache, OutOfSlots, Region, RegionAllocator, kv_bytes_per_token, utilization
from labcore.course.exercises.nb01_planted import CarelessCache


def kv_bytes_by_adding(num_layers, num_kv_heads, head_dim, dtype_bytes):
    total = 0
    for _ in range(num_layers):
        for _ in ("key", "value"):
            total += num_kv_heads * head_dim * dtype_bytes
    return total


def keys_only(num_layers, num_kv_heads, head_dim, dtype_bytes):
    return num_layers * num_kv_heads * head_dim * dtype_bytes


def one_layer(num_layers, num_kv_heads, head_dim, dtype_bytes):
    return 2 * num_kv_heads * head_dim * dtype_bytes


def bits_for_bytes(num_layers, num_kv_heads, head_dim, dtype_bytes):
    return 2 * num_layers * num_kv_heads * head_dim * 8 * dtype_bytes


def head_dim_left_out(num_layers, num_kv_heads, head_dim, dtype_bytes):
    return 2 * num_layers * num_kv_heads * dtype_bytes


class FreesByMap(RegionAllocator):
    """Marks slots in a map and reads the holes off it."""

    def free(self, region):
        free = [any(hole.start <= slot < hole.stop for hole in self.holes) for slot in range(self.num_slots)]
        if any(free[region.start : region.stop]):
            raise ValueError("not allocated")
        free[region.start : region.stop] = [True] * region.size
        self.holes, start = [], None
        for slot, is_free in enumerate([*free, False]):
            if is_free and start is None:
                start = slot
            if not is_free and start is not None:
                self.holes.append(Region(start, slot - start))
                start = None


class FreesNeighbours(RegionAllocator):
    """Takes the hole before and the hole behind out of the list, and puts one in."""

    def free(self, region):
        if any(hole.start < region.stop and region.start < hole.stop for hole in self.holes):
            raise ValueError("not allocated")
        start, stop = region.start, region.stop
        for hole in list(self.holes):
            if hole.stop == start or hole.start == stop:
                self.holes.remove(hole)
                start, stop = min(start, hole.start), max(stop, hole.stop)
        self.holes = sorted([*self.holes, Region(start, stop - start)])


class NeverMerges(RegionAllocator):
    def free(self, region):
        self._refuse(region)
        self.holes = sorted([*self.holes, region])

    def _refuse(self, region):
        if any(hole.start < region.stop and region.start < hole.stop for hole in self.holes):
            raise ValueError("not allocated")


class MergesForwardsOnly(NeverMerges):
    def free(self, region):
        self._refuse(region)
        for hole in self.holes:
            if hole.start == region.stop:
                self.holes.remove(hole)
                region = Region(region.start, region.size + hole.size)
                break
        self.holes = sorted([*self.holes, region])


class MergesOneSideOnly(NeverMerges):
    def free(self, region):
        self._refuse(region)
        for hole in self.holes:
            if region.start in (hole.stop, hole.start - region.size):
                self.holes.remove(hole)
                region = Region(min(region.start, hole.start), region.size + hole.size)
                break
        self.holes = sorted([*self.holes, region])


class MergesOverLivingRegions(NeverMerges):
    def free(self, region):
        self._refuse(region)
        start = min([region.start, *(hole.start for hole in self.holes)])
        self.holes = [Region(start, region.size + self.num_free)]


class ForgetsTheOrder(NeverMerges):
    def free(self, region):
        self._refuse(region)
        start, stop, rest = region.start, region.stop, []
        for hole in self.holes:
            if start in (hole.stop, hole.start - (stop - start)) or stop == hole.start:
                start, stop = min(start, hole.start), max(stop, hole.stop)
            else:
                rest.append(hole)
        self.holes = [*rest, Region(start, stop - start)]


class ChecksTheSize(ContiguousCache):
    def extend(self, layer, region, num_stored, k, v):
        if num_stored + k.shape[1] > region.size:
            raise OutOfSlots("no room")
        return super().extend(layer, region, num_stored, k, v)


class WritesTokenByToken(ContiguousCache):
    def extend(self, layer, region, num_stored, k, v):
        free = region.size - num_stored
        if free < k.shape[1]:
            raise OutOfSlots(f"{free} slots are left")
        for i in range(k.shape[1]):
            slot = region.start + num_stored + i
            self.k[layer][slot], self.v[layer][slot] = k[:, i], v[:, i]
        rows = slice(region.start, region.start + num_stored + k.shape[1])
        return self.k[layer][rows].transpose(0, 1), self.v[layer][rows].transpose(0, 1)


class LooksAtTheFirstTokenOnly(CarelessCache):
    def extend(self, layer, region, num_stored, k, v):
        if num_stored >= region.size:
            raise OutOfSlots("full")
        return super().extend(layer, region, num_stored, k, v)


class RefusesTheLastSlot(CarelessCache):
    def extend(self, layer, region, num_stored, k, v):
        if num_stored + k.shape[1] >= region.size:
            raise OutOfSlots("full")
        return super().extend(layer, region, num_stored, k, v)


class WritesAndThenLooks(CarelessCache):
    def extend(self, layer, region, num_stored, k, v):
        out = super().extend(layer, region, num_stored, k, v)
        if num_stored + k.shape[1] > region.size:
            raise OutOfSlots("full")
        return out


class DropsWhatDoesNotFit(CarelessCache):
    def extend(self, layer, region, num_stored, k, v):
        room = region.size - num_stored
        return super().extend(layer, region, num_stored, k[:, :room], v[:, :room])


class WritesWhatFitsAndThenRefuses(DropsWhatDoesNotFit):
    def extend(self, layer, region, num_stored, k, v):
        out = super().extend(layer, region, num_stored, k, v)
        if num_stored + k.shape[1] > region.size:
            raise OutOfSlots("full")
        return out


def busy_by_idle(spans):
    idle = sum(span.stop - span.start for span in spans if span.state == "idle")
    held = sum(span.stop - span.start for span in spans if span.state != "waiting")
    return 1 - idle / held


def counts_waiting(spans):
    work = sum(span.stop - span.start for span in spans if span.state in ("prefill", "decode"))
    return work / sum(span.stop - span.start for span in spans)


def forgets_prefill(spans):
    held = sum(span.stop - span.start for span in spans if span.state != "waiting")
    return sum(span.stop - span.start for span in spans if span.state == "decode") / held


def counts_spans(spans):
    held = [span for span in spans if span.state != "waiting"]
    return sum(span.state != "idle" for span in held) / len(held)


def in_percent(spans):
    return 100 * busy_by_idle(spans)


def gives_the_idle_share(spans):
    return 1 - busy_by_idle(spans)


RIGHT = {
    "01.kv_bytes": [kv_bytes_per_token, kv_bytes_by_adding],
    "01.free": [RegionAllocator, FreesByMap, FreesNeighbours],
    "01.neighbour": [ContiguousCache, ChecksTheSize, WritesTokenByToken],
    "01.utilization": [utilization, busy_by_idle],
}

WRONG = {
    "01.kv_bytes": [
        (keys_only, "a key and a value"),
        (one_layer, "what one layer takes"),
        (bits_for_bytes, "one byte a number"),
        (head_dim_left_out, "head_dim 64"),
    ],
    "01.free": [
        (NeverMerges, "ends where a hole begins"),
        (MergesForwardsOnly, "begins where a hole ends"),
        (MergesOneSideOnly, "on either side"),
        (MergesOverLivingRegions, "c still lies between them"),
        (ForgetsTheOrder, "first fit takes the lowest hole"),
    ],
    "01.neighbour": [
        (CarelessCache, "Bo's first token changed"),
        (LooksAtTheFirstTokenOnly, "Ana's region has 4 slots and 3 tokens; 2 more"),
        (RefusesTheLastSlot, "token 4 was refused"),
        (WritesAndThenLooks, "Bo's first token changed"),
        (DropsWhatDoesNotFit, "nobody objected"),
        (WritesWhatFitsAndThenRefuses, "had been written first"),
    ],
    "01.utilization": [
        (counts_waiting, "without a seat"),
        (forgets_prefill, "1 step of prefill"),
        (counts_spans, "Ana works for 4 steps"),
        (in_percent, "from 0 to 1"),
        (gives_the_idle_share, "Ana alone"),
    ],
}
