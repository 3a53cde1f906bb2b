"""Metrics: percentiles by nearest rank."""

from __future__ import annotations

import pytest

from labcore.workload.metrics import percentile


@pytest.mark.parametrize("q, expected", [(0.01, 1), (0.5, 50), (0.95, 95), (0.951, 96), (1.0, 100)])
def test_percentile_is_one_of_the_values_by_nearest_rank(q, expected):
    assert percentile(range(1, 101), q) == expected
