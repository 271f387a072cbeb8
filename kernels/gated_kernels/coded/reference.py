"""The diagonal recurrence over a codebook's maps, one after the other as they are defined.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, E size of a code, F codes, V value size.
"""

from __future__ import annotations

from torch import Tensor

from gated_kernels.codebook.reference import codebook
from gated_kernels.diagonal.reference import diagonal


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
    """See `gated_kernels.coded`."""
    q_BTHF = codebook(q_BTHD, q_turn_HDE, q_shift_HE, q_log_tau_H, codes_GFE)
    k_BTGF = codebook(k_BTGD, k_turn_GDE, k_shift_GE, k_log_tau_G, codes_GFE)
    return diagonal(
        q_BTHF,
        k_BTGF,
        v_BTGV,
        log_a,
        written_BTG=written_BTG,
        state_BGFV=state_BGFV,
        segment_BT=segment_BT,
        exclusive=exclusive,
    )
