"""The recurrences and the window as ops: one folder each, with a plain reference, a fast implementation and cases."""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from gated_kernels.delta.chunk import delta
from gated_kernels.diagonal.chunk import diagonal
from gated_kernels.elementwise.chunk import elementwise
from gated_kernels.momentum.chunk import momentum
from gated_kernels.slots.chunk import slots
from gated_kernels.window.chunk import window

OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "delta": delta,  # S_t = D_t S_{t-1} - e_t^T (r_t D_t S_{t-1}) + k_t^T v_t, o_t = q_t S_t
    "diagonal": diagonal,  # S_t = diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "elementwise": elementwise,  # S_t = exp(dt_t log A) * S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "momentum": momentum,  # Z_t = m_t Z_{t-1} + k_t^T (v_t - r_t M_{t-1}), M_t = a_t M_{t-1} + c_t Z_t, o_t = q_t M_t
    "slots": slots,  # softmax attention over M slots, running means of keys and values
    "window": window,  # softmax attention over the last keys and the sinks
}

TRITON = ("diagonal", "step", "window")  # what has a triton.py; a step has nothing else (see step/chunk.py)


def use(path: str) -> None:
    """Runs the ops that have Triton kernels by "triton" or by "torch" in the whole process.

    The default is "triton" where there are Triton and an Nvidia GPU; the environment variable GATED_KERNELS says
    otherwise at import. Tensors on a CPU always go to torch, and so does, with one warning that says why, what the
    kernels cannot do. Raises ValueError for any other path, and ImportError when Triton is not installed.
    """
    if path not in ("torch", "triton"):
        raise ValueError(f"the ops run by 'torch' or by 'triton', not by {path!r}")
    for op in TRITON:
        fast = getattr(import_module(f"gated_kernels.{op}.triton"), op) if path == "triton" else None
        import_module(f"gated_kernels.{op}.chunk").__dict__["fast"] = fast


def in_use() -> str:
    """What `use` chose last: "triton" or "torch"."""
    return "torch" if import_module("gated_kernels.diagonal.chunk").fast is None else "triton"


def _default() -> str:
    return "triton" if torch.version.cuda and torch.cuda.is_available() and find_spec("triton") else "torch"


use(os.environ.get("GATED_KERNELS") or _default())

__all__ = ["OPS", "delta", "diagonal", "elementwise", "in_use", "momentum", "slots", "use", "window"]
