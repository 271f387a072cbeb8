"""The recurrences and the window as ops: one folder each, with a plain reference, a fast implementation and cases."""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from gated_kernels.codebook.chunk import codebook
from gated_kernels.coded.chunk import coded
from gated_kernels.delta.chunk import delta
from gated_kernels.diagonal.chunk import diagonal
from gated_kernels.elementwise.chunk import elementwise
from gated_kernels.momentum.chunk import momentum
from gated_kernels.slots.chunk import slots
from gated_kernels.window.chunk import window

OPS: dict[str, Callable[..., Tensor | tuple[Tensor | None, ...]]] = {
    "codebook": codebook,  # phi(x) = softmax(tau C u), u = P x + b brought to length 1
    "coded": coded,  # the diagonal recurrence of a codebook's maps
    "delta": delta,  # S_t = D_t S_{t-1} - e_t^T (r_t D_t S_{t-1}) + k_t^T v_t, o_t = q_t S_t
    "diagonal": diagonal,  # S_t = diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "elementwise": elementwise,  # S_t = exp(dt_t log A) * S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "momentum": momentum,  # Z_t = m_t Z_{t-1} + k_t^T (v_t - r_t M_{t-1}), M_t = a_t M_{t-1} + c_t Z_t, o_t = q_t M_t
    "slots": slots,  # softmax attention over M slots, running means of keys and values
    "window": window,  # softmax attention over the last keys and the sinks
}

# What has a triton.py; a step has nothing else (see step/chunk.py).
TRITON = ("codebook", "coded", "diagonal", "step", "window")
FLA = ("delta",)  # what has a fla.py instead, for a kernel of flash-linear-attention


def use(path: str) -> None:
    """Runs the ops by "torch", or those with kernels by these in the whole process: "triton" are our own, "triton+fla"
    also those of flash-linear-attention for what has none of ours.

    The default is "triton" where there are Triton and an Nvidia GPU, or "triton+fla" where fla-core 0.6 is there, too;
    the environment variable GATED_KERNELS says otherwise at import. Tensors on a CPU always go to torch, and so does,
    with one warning that says why, what the kernels cannot do. Raises ValueError for any other path, and ImportError
    when what it needs is not installed.
    """
    if path not in ("torch", "triton", "triton+fla"):
        raise ValueError(f"the ops run by 'torch', by 'triton' or by 'triton+fla', not by {path!r}")
    if path == "triton+fla" and not has_fla():
        raise ImportError("the path 'triton+fla' needs fla-core 0.6: pip install 'liger-convert[fla]'")
    for op in (*TRITON, *FLA):
        file = "triton" if op in TRITON else "fla"
        fast = getattr(import_module(f"gated_kernels.{op}.{file}"), op) if file in path.split("+") else None
        import_module(f"gated_kernels.{op}.chunk").__dict__["fast"] = fast


def in_use() -> str:
    """What `use` chose last."""
    own, others = (import_module(f"gated_kernels.{op}.chunk").fast for op in (TRITON[0], FLA[0]))
    return "torch" if own is None else "triton" if others is None else "triton+fla"


def has_fla() -> bool:
    """Whether the version of fla-core is installed that the adapters are written for; imports nothing of it."""
    try:
        return version("fla-core").startswith("0.6.") and find_spec("einops") is not None
    except PackageNotFoundError:
        return False


def _default() -> str:
    if not (torch.version.cuda and torch.cuda.is_available() and find_spec("triton")):
        return "torch"
    return "triton+fla" if has_fla() else "triton"


use(os.environ.get("GATED_KERNELS") or _default())

__all__ = [
    "OPS",
    "codebook",
    "coded",
    "delta",
    "diagonal",
    "elementwise",
    "has_fla",
    "in_use",
    "momentum",
    "slots",
    "use",
    "window",
]
