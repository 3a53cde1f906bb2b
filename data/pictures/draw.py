"""Draw the figures of the README from a run of the real model: `python data/pictures/draw.py`. Needs chromium."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

from labcore import LLM, SamplingParams
from labcore.baseline.naive import static_batches
from labcore.recorder import Recording
from labcore.workload.traces import TraceRequest
from labcore.viz import Figure, block_map, timeline
from labcore.viz.figure import without_slider

HERE = Path(__file__).parent
ASSISTANT = "You are a helpful assistant who answers in one short sentence and never guesses. "
QUESTIONS = {
    "ana": (ASSISTANT + "What is a cache?", 30),
    "bo": (ASSISTANT + "Why is the sea salty?", 14),
    "cy": ("Count slowly from one to twenty, please:", 40),
    "dee": (ASSISTANT + "Name a colour.", 8),
    "eve": ("Once upon a time there was a small engine that", 24),
}


def recorded() -> Recording:
    """A flight record of five requests, three with a common prefix, in a pool slightly too small for them."""
    llm = LLM("smollm2-135m", num_blocks=16, block_size=8, max_num_seqs=3, max_model_len=96, record=True)
    engine = llm.engine
    for name, (text, max_tokens) in QUESTIONS.items():
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(name, llm.tokenizer.encode(text), params)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.recorder


def most_telling(recording: Recording) -> int:
    """The step with the most states of blocks."""
    states = ("owned", "shared", "cached", "free")
    return max(recording.steps, key=lambda step: sum(recording.at(step).count(state) > 0 for state in states))


def save(figure: Figure, name: str, width: int) -> None:
    """Save a figure as PNG, drawn by the browser at 1.5 times its size."""
    drawn = without_slider(figure)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, device_scale_factor=1.5)
        page.set_content('<body style="margin:0"><div id="picture"></div></body>')
        page.add_script_tag(content=get_plotlyjs())
        page.evaluate(f"Plotly.newPlot('picture', {json.dumps({k: drawn[k] for k in ('data', 'layout')})})")
        page.locator("#picture .svg-container").screenshot(path=HERE / name)
        browser.close()


if __name__ == "__main__":
    recording = recorded()
    lengths = [
        TraceRequest(arrival=0.0, prompt_tokens=1, output_tokens=max_tokens) for _, max_tokens in QUESTIONS.values()
    ]
    waits = static_batches(lengths, 3, list(QUESTIONS))
    static = [replace(span, start=span.start + 1, stop=span.stop + 1) for span in waits]  # steps count from 1, as in recordings
    save(block_map(recording, most_telling(recording)), "block_map.png", 760)
    save(timeline(static, recording, titles=["static batches of 3", "continuous batching"]), "timeline.png", 900)
