"""Make conversations.jsonl, the synthetic log of conversations that the course ships; run this file.

No line is copied from a real log. Lengths and reuse follow the published figures of the conversation trace of Mooncake
(FAST'25; kvcache-ai/Mooncake, Apache-2.0), and so does the format:

    prompt tokens   mean 12,035, median 6,909       output tokens   mean 343
    reuse           36.6 % of the blocks (512 tokens) repeat an earlier block if nothing is ever forgotten

Somebody brings a document and asks; with luck they ask again. Each turn sends everything said so far and something new,
so that its first blocks are those of the turn before. Everybody's block 0 is the same, the system prompt.
"""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path

NUM_REQUESTS = 1000
SEED = 204  # of the first four hundred seeds, one of the two that come nearest to the published figures
CONVERSATIONS_PER_SECOND = 1.6
SECONDS_PER_TOKEN = 0.03  # nobody replies before the answer is there
SECONDS_TO_REPLY = 40
ASK_AGAIN = 0.45
BLOCK = 512


def conversation(start: float, fresh: count, rng: random.Random) -> list[dict]:
    """One conversation from its first turn to its last."""
    rows, blocks, context, when = [], [0], 0, start
    while True:
        news = rng.lognormvariate(8.34, 1.13) if not rows else rng.lognormvariate(7.6, 1.5)
        context = min(120_000, context + max(40, round(news)) + (0 if rows else BLOCK))
        output = max(1, min(2000, round(rng.lognormvariate(5.5, 0.85))))
        kept = (rows[-1]["input_length"] if rows else BLOCK) // BLOCK  # full blocks of what was sent before
        blocks = blocks[:kept] + [next(fresh) for _ in range(-(-context // BLOCK) - kept)]
        rows.append(
            {"timestamp": round(when * 1000), "input_length": context, "output_length": output, "hash_ids": blocks}
        )
        context += output
        when += output * SECONDS_PER_TOKEN + rng.expovariate(1 / SECONDS_TO_REPLY)
        if rng.random() > ASK_AGAIN:
            return rows


def main() -> None:
    rng, fresh, rows, start = random.Random(SEED), count(1), [], 0.0
    while len(rows) < 1.5 * NUM_REQUESTS:
        rows += conversation(start, fresh, rng)
        start += rng.expovariate(CONVERSATIONS_PER_SECOND)
    rows = sorted(rows, key=lambda row: row["timestamp"])[:NUM_REQUESTS]
    names: dict[int, int] = {}
    with (Path(__file__).parent / "conversations.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:  # ids count in order of appearance, as in the original format
            row["hash_ids"] = [names.setdefault(block, len(names)) for block in row["hash_ids"]]
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
