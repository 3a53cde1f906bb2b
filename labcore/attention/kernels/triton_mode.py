"""Compiled or interpreted: the one place that decides, before the first kernel exists.

`@triton.jit` looks at `TRITON_INTERPRET` at the moment it decorates a function, so the choice has to be made before a
kernel module is imported, and holds for the whole process. Kernel modules get `triton` and `tl` from here:

    from labcore.attention.kernels.triton_mode import tl, triton

What is chosen: your own setting of TRITON_INTERPRET if there is one; else compiled where torch sees a GPU, and
interpreted (every program of the grid in turn, as numpy on CPU tensors) where it doesn't.
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
    # transformers imports triton, so its library functions may have been decorated before the choice was made. Decorate
    # them again, or a kernel's tl.sum would refuse to run "outside of the scope of a kernel".
    importlib.reload(sys.modules["triton.language.standard"])
    importlib.reload(tl)
