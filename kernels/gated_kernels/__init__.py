"""Linear-time recurrences and sliding-window attention as ops, one folder each.

A folder has `naive.py`, a plain loop that defines the op; `chunk.py`, the op itself, which runs in torch on any device;
`triton.py`, kernels that may run in its place; and `cases.py`, the inputs that tests and `kernels/check_gpu.py` run.
Functions are named after both: `naive_gla`, `chunk_gla`, `triton_gla`.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from gated_kernels.codebook.chunk import chunk_codebook
from gated_kernels.codebook_gla.chunk import chunk_codebook_gla
from gated_kernels.common.registry import kernel_for, kernels_for, set_kernel
from gated_kernels.delta_rule.chunk import chunk_delta_rule
from gated_kernels.elementwise.chunk import chunk_elementwise
from gated_kernels.gla.chunk import chunk_gla
from gated_kernels.inner_model.chunk import chunk_inner_model
from gated_kernels.momentum.chunk import chunk_momentum
from gated_kernels.simple_gla.chunk import chunk_simple_gla
from gated_kernels.slots.chunk import chunk_slots
from gated_kernels.swa.chunk import chunk_swa

# Every op and its definition. S is a state, a a gate, q, k and v a token's query, key and value.
OPS: dict[str, Callable[..., Tensor | tuple[Tensor | None, ...]]] = {
    "codebook": chunk_codebook,  # phi(x) = softmax(u C / temperature), u = P x + b brought to length 1
    "codebook_gla": chunk_codebook_gla,  # gla of phi(q) and phi(k)
    "delta_rule": chunk_delta_rule,  # S_t = D_t S_{t-1} - e_t^T (r_t D_t S_{t-1}) + k_t^T v_t, o_t = q_t S_t
    "elementwise": chunk_elementwise,  # S_t = exp(dt_t log A) * S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "gla": chunk_gla,  # S_t = diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "inner_model": chunk_inner_model,  # a model W trained on every token: W_t = a_t W_{t-1} + Z_t, o_t = f(q_t; W_t)
    "momentum": chunk_momentum,  # Z_t = m_t Z_{t-1} + k_t^T (v_t - r_t M_{t-1}), M_t = a_t M_{t-1} + c_t Z_t
    "simple_gla": chunk_simple_gla,  # gla with one gate per head: S_t = a_t S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "slots": chunk_slots,  # softmax attention over a fixed number of slots, running means of keys and values
    "swa": chunk_swa,  # softmax attention over the last keys and the sinks
}

# The kernels of each library: op -> module and function. `fused_step`, `delta_rule_step`, and those of prompts and
# projections have no torch op of their own. Where both libraries have kernels for an op, ours are asked first, and
# fla-core's for what ours do not take.
KERNELS: dict[str, dict[str, tuple[str, str]]] = {
    "triton": {
        op: (f"gated_kernels.{op}.triton", f"triton_{op}")
        for op in (
            "codebook",
            "codebook_gla",
            "delta_rule",
            "elementwise",
            "fused_step",
            "gla",
            "simple_gla",
            "slots",
            "swa",
        )
    }
    | {"delta_rule_step": ("gated_kernels.delta_rule.triton", "triton_delta_rule_step")}
    | {op: ("gated_kernels.prompt.triton", f"triton_{op}") for op in ("memory_logit", "rms_norm", "rotary")}
    | {op: ("gated_kernels.projections.triton", f"triton_{op}") for op in ("projections", "swiglu")},
    "fla": {"delta_rule": ("gated_kernels.delta_rule.fla", "fla_delta_rule")},
}
OLDEST = (8, 0)  # compute capability: the kernels take bf16 products, and tiles that no older chip's memory holds


def use(path: str) -> None:
    """Chooses how the ops run in the whole process.

    "torch" runs the torch ops, "triton" our own kernels where an op has some, and "triton+fla" also those of
    flash-linear-attention, for calls of the delta rule that ours do not take (heads of more than 128 features). "fla"
    runs flash-linear-attention's alone, to compare with. The default is "triton+fla", or "triton" without fla-core 0.6,
    on Nvidia GPUs from sm_80 on where Triton is installed. On other GPUs the ops run in torch, and the log says so
    once. The environment variable GATED_KERNELS overrides the default when this package is imported. Tensors on a CPU
    always go to torch. So does what the kernels do not support, with one warning that says why.

    Raises ValueError for any other path, and ImportError when a package that it needs is not installed.
    """
    libraries = [] if path == "torch" else path.split("+")
    if not set(libraries) <= set(KERNELS) or len(set(libraries)) < len(libraries):
        raise ValueError(f"the ops run by 'torch', or by some of {', '.join(KERNELS)} joined by +, not by {path!r}")
    if "fla" in libraries and not has_fla():
        raise ImportError(f"the path {path!r} needs fla-core 0.6: pip install 'liger-convert[fla]'")
    for op in dict.fromkeys(op for kernels in KERNELS.values() for op in kernels):
        chosen = [kernels[op] for library, kernels in KERNELS.items() if library in libraries and op in kernels]
        set_kernel(op, *(getattr(import_module(module), function) for module, function in chosen))


def in_use() -> str:
    """The path that `use` chose last."""
    modules = {kernel.__module__ for kernels in KERNELS.values() for op in kernels for kernel in kernels_for(op)}
    chosen = [library for library, kernels in KERNELS.items() if modules & {module for module, _ in kernels.values()}]
    return "+".join(chosen) or "torch"


def has_fla() -> bool:
    """Whether fla-core is installed in the version that the adapters are written for. Imports nothing of it."""
    try:
        return version("fla-core").startswith("0.6.") and find_spec("einops") is not None
    except PackageNotFoundError:
        return False


def unsuited() -> str | None:
    """Why the kernels do not run on the GPUs of this machine, in a sentence; None where they do or there is none."""
    if not torch.cuda.is_available():
        return None
    if not torch.version.cuda:
        return "the GPU is not one of Nvidia's, for which the Triton kernels are written, so all ops run in torch"
    oldest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
    major, minor = torch.cuda.get_device_capability(oldest)
    if (major, minor) < OLDEST:
        return (
            f"{torch.cuda.get_device_name(oldest)} has compute capability {major}.{minor}, the Triton kernels take "
            f"{OLDEST[0]}.{OLDEST[1]} or more, so all ops run in torch"
        )
    return None


def _default() -> str:
    if not (torch.cuda.is_available() and torch.version.cuda and find_spec("triton")):
        return "torch"
    return "triton+fla" if has_fla() else "triton"


def _leave_unsuited() -> None:
    """Has the ops run in torch where the GPUs are not such as the kernels take, and says why."""
    if why := unsuited():
        use("torch")
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of the processes of a run one says it
            logging.getLogger(__name__).warning(why)


if path := os.environ.get("GATED_KERNELS"):
    use(path)
else:
    use(_default())
    # asked for its capability, a GPU is initialized, which an import must not do: processes that fork later could not
    # use it. So torch asks, when it initializes the GPU itself
    torch.cuda._lazy_call(_leave_unsuited)

__all__ = [
    "KERNELS",
    "OPS",
    "chunk_codebook",
    "chunk_codebook_gla",
    "chunk_delta_rule",
    "chunk_elementwise",
    "chunk_gla",
    "chunk_inner_model",
    "chunk_momentum",
    "chunk_simple_gla",
    "chunk_slots",
    "chunk_swa",
    "has_fla",
    "in_use",
    "kernel_for",
    "unsuited",
    "use",
]
