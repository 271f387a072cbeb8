"""The definition of gated linear attention over a codebook's features: the naive forms of both ops in a row.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, E size of a code, F codes, V value size.
"""

from __future__ import annotations

from torch import Tensor

from gated_kernels.codebook.naive import naive_codebook
from gated_kernels.gla.naive import naive_gla


def naive_codebook_gla(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    q_proj_HDE: Tensor,
    q_bias_HE: Tensor,
    q_log_inv_temperature_H: Tensor,
    k_proj_GDE: Tensor,
    k_bias_GE: Tensor,
    k_log_inv_temperature_G: Tensor,
    codes_GFE: Tensor,
    *,
    write_mask_BTG: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `gated_kernels.chunk_codebook_gla`."""
    q_BTHF = naive_codebook(q_BTHD, q_proj_HDE, q_bias_HE, q_log_inv_temperature_H, codes_GFE)
    k_BTGF = naive_codebook(k_BTGD, k_proj_GDE, k_bias_GE, k_log_inv_temperature_G, codes_GFE)
    return naive_gla(
        q_BTHF,
        k_BTGF,
        v_BTGV,
        log_a,
        write_mask_BTG=write_mask_BTG,
        initial_state=initial_state,
        segment_ids_BT=segment_ids_BT,
        exclusive=exclusive,
    )
