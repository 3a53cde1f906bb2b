"""Empirical CDF: the share of requests with a latency of at most x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labcore.viz.figure import Figure, TextView, axis, figure
from labcore.viz.style import INK, PALETTE, safe, short
from labcore.workload.metrics import percentile

# Colour, dash and marker of each line: distinct without colour, too.
LOOKS = tuple(
    zip(PALETTE[:4], ("solid", "dash", "dot", "dashdot"), ("circle", "square", "diamond", "cross"), strict=True)
)
QUANTILES = (0.5, 0.9, 0.99)


def cdf(samples: Mapping[str, Sequence[float]], unit: str) -> Figure:
    """One step line per sample (name → one value per request, at most four names); further left is better.

    unit: label of the values, such as "steps to the first token". Raises ValueError for more names or an empty sample.
    """
    if len(samples) > len(LOOKS) or not all(len(values) for values in samples.values()):
        raise ValueError(f"samples must have at most {len(LOOKS)} names, each with numbers: {', '.join(samples)}.")
    traces = [_line(name, values, *look) for (name, values), look in zip(samples.items(), LOOKS, strict=False)]
    layout = {
        "height": 300,
        "margin": {"t": 40},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "xaxis": axis(unit, rangemode="tozero"),
        "yaxis": axis("of the requests", range=[0, 1.02], tickformat=".0%"),
    }
    return figure(traces, layout, cdf_text(samples, unit))


def cdf_text(samples: Mapping[str, Sequence[float]], unit: str) -> TextView:
    """Percentiles and mean, one line per sample: `static   P50 12   P90 40   P99 41   mean 20.5   steps to the first token`."""
    width = max(map(len, samples), default=0)
    lines = []
    for name, values in samples.items():
        marks = [f"P{100 * q:.0f} {percentile(values, q):6,.4g}" for q in QUANTILES]
        lines.append("   ".join([f"{name:{width}}", *marks, f"mean {sum(values) / len(values):6,.4g}", unit]))
    return TextView("\n".join(lines))


def _line(name: str, values: Sequence[float], colour: str, dash: str, marker: str) -> dict[str, Any]:
    ordered = sorted(values)
    every = max(1, len(ordered) // 8)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": safe(short(name, 40)),
        "x": [0, *(round(value, 4) for value in ordered)],
        "y": [0, *(round((i + 1) / len(ordered), 4) for i in range(len(ordered)))],
        "line": {"shape": "hv", "color": colour, "dash": dash, "width": 2.5},
        "marker": {
            "symbol": marker, "color": colour, "line": {"color": INK, "width": 0.8},
            "size": [0, *(8 if (i + 1) % every == 0 else 0 for i in range(len(ordered)))],
        },
        "hovertemplate": safe(short(name, 40)) + ": %{y:.0%} within %{x:.4g}<extra></extra>",
    }  # fmt: skip
