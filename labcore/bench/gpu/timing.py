"""GPU timing: CUDA events over repeated runs with a cold L2 cache, and a deadline for the whole benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceTimes:
    """Milliseconds of one run on the device: median, 20th and 80th percentile."""

    median: float
    fast: float
    slow: float


def device_times(run: Callable[[], object], budget_ms: int = 60) -> DeviceTimes:
    """Time `run` as a captured CUDA graph (no host launch overhead), with a cold L2 cache."""
    from triton.testing import do_bench

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    median, fast, slow = do_bench(graph.replay, warmup=10, rep=budget_ms, quantiles=[0.5, 0.2, 0.8])
    return DeviceTimes(median, fast, slow)


def copy_bandwidth(gib: float = 1.0) -> float:
    """GB/s of a device-to-device copy, bytes read plus written: the limit of a memory-bound kernel."""
    src = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_()
    dst = torch.empty_like(src)
    return 2 * src.numel() / device_times(lambda: dst.copy_(src), 300).median / 1e6


class Deadline:
    """A budget of minutes. Skipped measurements are listed in `left_out`."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def allows(self, what: str, seconds: float) -> bool:
        """Whether about `seconds` are left; if not, add `what` to `left_out`."""
        if time.monotonic() + seconds <= self.end:
            return True
        self.left_out.append(what)
        return False
