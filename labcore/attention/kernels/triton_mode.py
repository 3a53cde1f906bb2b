"""Triton mode of the process, compiled or interpreted, set before any kernel is defined.

`@triton.jit` reads `TRITON_INTERPRET` when it decorates a function, so the mode must be set before a kernel module is
imported, and holds for the process. Kernel modules import `triton` and `tl` from here:

    from labcore.attention.kernels.triton_mode import tl, triton

TRITON_INTERPRET decides if it is set. Otherwise kernels are compiled if torch sees a GPU, else interpreted (each program
of the grid in turn, as numpy on CPU tensors).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

import torch

NO_TRITON = (
    "the Triton kernels need the triton package, which exists for Linux only — use attention_backend='torch', "
    "or a Linux machine (pip install triton)."
)

if importlib.util.find_spec("triton") is None:
    raise ImportError(NO_TRITON)

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""True when kernels run in Triton's interpreter, on CPU tensors."""

if INTERPRETED and isinstance(tl.sum, triton.JITFunction):
    # transformers imports triton, so Triton's library functions may be decorated already, in compiled mode. Reload them,
    # or tl.sum raises "outside of the scope of a kernel".
    importlib.reload(sys.modules["triton.language.standard"])
    importlib.reload(tl)
