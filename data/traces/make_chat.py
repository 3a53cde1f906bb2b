"""Make chat.csv, the synthetic request log that the course ships: `python data/traces/make_chat.py`.

No line is copied from a real log. The lengths are drawn from two curves that reproduce the published figures of the
Azure LLM inference trace 2023, conversation service (Azure/AzurePublicDataset, CC-BY 4.0):

    prompt tokens   mean 1155, median 1020, p99 4142      output tokens   mean 211, median 129, p99 601
    arrivals        5.53 requests a second, coefficient of variation between arrivals 1.09

Each curve lists (share of requests, at most so many tokens), its knots rounded from that trace; between two knots it is
a straight line. Every request takes its own slice of the curve and the slices are shuffled, so that 2,000 requests hit
the figures without luck. Prompt and output lengths are drawn independently.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from pathlib import Path

HEADER = """\
# Synthetic chat traffic, made by data/traces/make_chat.py (seeded); lengths and arrivals follow the published
# figures of the Azure LLM inference trace 2023, conversation. No line is copied from a real log.
arrival_s,prompt_tokens,output_tokens
"""
NUM_REQUESTS = 2000
SEED = 97  # of the first hundred seeds, the one whose gaps come nearest to the published variation
REQUESTS_PER_SECOND = 5.53
ARRIVAL_CV = 1.09
PROMPT_CURVE = [
    (0, 4), (0.05, 180), (0.1, 207), (0.15, 370), (0.3, 403), (0.4, 700), (0.5, 1020), (0.7, 1130),
    (0.8, 1315), (0.85, 1880), (0.9, 2820), (0.95, 4075), (0.99, 4142), (1, 7000),
]  # fmt: skip
OUTPUT_CURVE = [
    (0, 7), (0.1, 54), (0.25, 83), (0.4, 102), (0.5, 129), (0.6, 170), (0.7, 384), (0.9, 422), (0.95, 451),
    (0.99, 601), (0.995, 643), (1, 1000),
]  # fmt: skip


def lengths(curve: list[tuple[float, int]], count: int, rng: random.Random) -> list[int]:
    """`count` whole token counts that follow the curve, in random order."""
    shares = [share for share, _ in curve]
    drawn = []
    for i in range(count):
        share = (i + 0.5) / count
        right = bisect_right(shares, share)
        (s0, t0), (s1, t1) = curve[right - 1], curve[right]
        drawn.append(round(t0 + (t1 - t0) * (share - s0) / (s1 - s0)))
    rng.shuffle(drawn)
    return drawn


def arrivals(count: int, rng: random.Random) -> list[float]:
    """Seconds since the start; the gaps are gamma-distributed, a little burstier than a Poisson stream."""
    shape = 1 / ARRIVAL_CV**2
    gaps = [rng.gammavariate(shape, 1 / shape) for _ in range(count - 1)]
    scale = (count - 1) / REQUESTS_PER_SECOND / sum(gaps)
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap * scale)
    return times


def main() -> None:
    rng = random.Random(SEED)
    prompts, outputs = lengths(PROMPT_CURVE, NUM_REQUESTS, rng), lengths(OUTPUT_CURVE, NUM_REQUESTS, rng)
    rows = zip(arrivals(NUM_REQUESTS, rng), prompts, outputs)
    with (Path(__file__).parent / "chat.csv").open("w", encoding="utf-8", newline="\n") as file:
        file.write(HEADER)
        file.writelines(f"{arrival:.3f},{prompt},{output}\n" for arrival, prompt, output in rows)


if __name__ == "__main__":
    main()
