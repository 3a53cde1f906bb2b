"""Select an attention backend by name, or use a custom one."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from labcore.attention.backend import AttentionBackend
from labcore.attention.torch_backend import TorchAttention

BACKENDS = ("auto", "torch", "triton")


def select_backend(choice: str | AttentionBackend | type[AttentionBackend], device: torch.device) -> AttentionBackend:
    """The backend for a device. "auto" is Triton on a GPU if it is installed, else torch.

    Raises ValueError for an unknown name, and for "triton" if Triton isn't installed.
    """
    if isinstance(choice, AttentionBackend):
        return choice
    if isinstance(choice, type) and issubclass(choice, AttentionBackend):
        try:
            return choice()
        except TypeError as error:
            raise ValueError(f"attention_backend is {choice!r}, which can't be made without arguments: {error}") from error
    if not isinstance(choice, str) or choice not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"attention_backend is {choice!r}; it must be one of {names}, or an AttentionBackend.")
    has_triton = find_spec("triton") is not None
    if choice == "triton" and not has_triton:
        raise ValueError("attention_backend is 'triton', but Triton isn't installed here (Linux only); use 'torch'.")
    if choice == "torch" or (choice == "auto" and not (has_triton and device.type == "cuda")):
        return TorchAttention()
    from labcore.attention.triton_backend import TritonAttention  # imported on demand: needs Triton

    return TritonAttention()
