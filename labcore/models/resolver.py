"""Resolve a model name to a folder or a Hugging Face id."""

from __future__ import annotations

import re
from pathlib import Path

from labcore.models.download import DEFAULT_MODEL, fetch_default
from labcore.models.errors import ModelError

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def resolve(name: str | Path) -> Path | str:
    """The folder of a model, or its Hugging Face id for transformers to load.

    name   "smollm2-135m" (downloaded if not cached), a folder, or a Hugging Face id

    Raises ModelError if the folder doesn't exist or holds no model, ValueError if `name` is none of the three.
    """
    if not isinstance(name, (str, Path)) or not str(name).strip():
        raise ValueError(f"model is {name!r}; it must be {DEFAULT_MODEL!r}, a folder, or a Hugging Face id.")
    if name == DEFAULT_MODEL:
        return fetch_default()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return checked_folder(folder)
    if folder.is_file():
        raise ModelError(f"{name} is a file — pass the folder that holds config.json and the weights.")
    if isinstance(name, Path) or not HUB_ID.fullmatch(name):
        raise ModelError(f"there is no folder {name} — pass one that exists, {DEFAULT_MODEL!r}, or a Hugging Face id.")
    return name


def checked_folder(folder: Path) -> Path:
    """`folder`, if it has a config and weights. Raises ModelError that says what is missing."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json — pass a folder that save_pretrained() wrote, or a copy of one from the hub."
        )
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise ModelError(f"{folder} has no weights ({' or '.join(WEIGHTS)}) — download them beside its config.json.")
    return folder
