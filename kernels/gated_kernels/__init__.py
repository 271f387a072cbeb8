"""The recurrences and the window as ops: one folder each, with a plain reference, a fast implementation and cases."""

from collections.abc import Callable

from torch import Tensor

from gated_kernels.diagonal.chunk import diagonal
from gated_kernels.elementwise.chunk import elementwise
from gated_kernels.slots.chunk import slots
from gated_kernels.window.chunk import window

OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "diagonal": diagonal,  # S_t = diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "elementwise": elementwise,  # S_t = exp(dt_t log A) * S_{t-1} + k_t^T v_t, o_t = q_t S_t
    "slots": slots,  # softmax attention over M slots, running means of keys and values
    "window": window,  # softmax attention over the last keys and the sinks
}

__all__ = ["OPS", "diagonal", "elementwise", "slots", "window"]
