"""Time on a GPU: from its own events, over repeated runs with a cold cache, and a budget for all of them together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceTimes:
    """Milliseconds of one run on the device: the median, and what a fifth of the runs stay below and exceed."""

    median: float
    fast: float
    slow: float


def device_times(run: Callable[[], object], budget_ms: int = 60) -> DeviceTimes:
    """Time `run` as a captured graph, so that the launching host is out of the figure, with the L2 cache cold."""
    from triton.testing import do_bench

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    median, fast, slow = do_bench(graph.replay, warmup=10, rep=budget_ms, quantiles=[0.5, 0.2, 0.8])
    return DeviceTimes(median, fast, slow)


def copy_bandwidth(gib: float = 1.0) -> float:
    """GB/s of a device-to-device copy, bytes read plus bytes written: the limit of a kernel that is bound by memory."""
    src = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_()
    dst = torch.empty_like(src)
    return 2 * src.numel() / device_times(lambda: dst.copy_(src), 300).median / 1e6


class Deadline:
    """A budget of minutes. What doesn't fit any more is left out by name, never silently."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def allows(self, what: str, seconds: float) -> bool:
        """Whether there is time for something that takes about `seconds`; if not, it is noted."""
        if time.monotonic() + seconds <= self.end:
            return True
        self.left_out.append(what)
        return False
