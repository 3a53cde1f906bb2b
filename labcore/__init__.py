"""labcore: a language-model inference engine that is built, notebook by notebook, from an empty cell.

    from labcore import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    llm.chat([{"role": "user", "content": "What is paging?"}], SamplingParams(temperature=0, max_tokens=64))
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "LLM": "labcore.llm",
    "EngineConfig": "labcore.config",
    "SamplingParams": "labcore.sampling_params",
    "BeamSearchParams": "labcore.sampling_params",
}

__all__ = ["LLM", "BeamSearchParams", "EngineConfig", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `import labcore` alone stays free of torch, and fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'labcore' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
