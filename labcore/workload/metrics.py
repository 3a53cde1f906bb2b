"""Latency statistics of a workload. Extended in notebook 09."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest-rank percentile: the smallest value that at least a share `q` of the values, 0 < q ≤ 1, does not exceed."""
    return sorted(values)[ceil(round(q * len(values), 9)) - 1]
