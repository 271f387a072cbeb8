"""The diagonal recurrence over a codebook's maps: the two ops one after the other, in torch or by their own kernels.

Kernels that take all of it (`fast`) need not keep the maps for the backward pass, the largest that a layer makes.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, E size of a code, F codes, V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gated_kernels.codebook.chunk import codebook
from gated_kernels.diagonal.chunk import diagonal

# What `gated_kernels.use` puts before this op; it returns None for inputs that it leaves to it.
fast: Callable[..., tuple[Tensor, Tensor | None, Tensor] | None] | None = None


def coded(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    q_turn_HDE: Tensor,
    q_shift_HE: Tensor,
    q_log_tau_H: Tensor,
    k_turn_GDE: Tensor,
    k_shift_GE: Tensor,
    k_log_tau_G: Tensor,
    codes_GFE: Tensor,
    *,
    written_BTG: Tensor | None = None,
    state_BGFV: Tensor | None = None,
    segment_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`gated_kernels.diagonal` of `gated_kernels.codebook` of queries and keys: S_t = diag(a_t) S_{t-1} + phi(k_t)^T
    v_t, o_t = phi(q_t) S_t. A token not written whose values and log gates are zeros leaves the state as it is."""
    of_q, of_k = (q_turn_HDE, q_shift_HE, q_log_tau_H), (k_turn_GDE, k_shift_GE, k_log_tau_G)
    if q_BTHD.shape[2] % k_BTGD.shape[2]:
        raise ValueError(f"{q_BTHD.shape[2]} query heads are no multiple of {k_BTGD.shape[2]} key-value heads")
    options: dict[str, Any] = {
        "written_BTG": written_BTG, "state_BGFV": state_BGFV, "segment_BT": segment_BT, "exclusive": exclusive
    }  # fmt: skip
    if fast is not None and q_BTHD.shape[1] > 1:
        found = fast(q_BTHD, k_BTGD, v_BTGV, log_a, *of_q, *of_k, codes_GFE, **options)
        if found is not None:
            return found
    q_BTHF, k_BTGF = codebook(q_BTHD, *of_q, codes_GFE), codebook(k_BTGD, *of_k, codes_GFE)
    return diagonal(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
