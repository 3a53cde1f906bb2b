"""Models: resolve a name, download the default model, reject unsupported architectures, load.

    loaded = load("smollm2-135m")    # or a local folder, or a Hugging Face id of a decoder
    loaded.layers[0]                 # LayerShape(num_query_heads=9, num_kv_heads=3, head_dim=64, sliding_window=None)

Importing this package imports no torch; `load` and `from_model` do.
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "fetch_default": "labcore.models.download",
    "resolve": "labcore.models.resolver",
    "load": "labcore.models.loader",
    "from_model": "labcore.models.loader",
    "LoadedModel": "labcore.models.loader",
    "LayerShape": "labcore.models.layers",
    "ModelError": "labcore.models.errors",
    "UnsupportedModel": "labcore.models.errors",
}

__all__ = [
    "LayerShape",
    "LoadedModel",
    "ModelError",
    "UnsupportedModel",
    "fetch_default",
    "from_model",
    "load",
    "resolve",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use: downloading a model, or using LayerShape, must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'labcore.models' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
