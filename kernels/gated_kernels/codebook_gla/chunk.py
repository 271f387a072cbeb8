"""Gated linear attention over a codebook's features: the two ops one after the other, or kernels that combine them.

The combined kernels need not save the features, a layer's largest tensors, for the backward pass.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, E size of a code, F codes, V value size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gated_kernels.codebook.chunk import chunk_codebook
from gated_kernels.common.registry import kernel_for
from gated_kernels.gla.chunk import chunk_gla


def chunk_codebook_gla(
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
    """S_t = diag(a_t) S_{t-1} + phi(k_t)^T v_t, o_t = phi(q_t) S_t.

    phi is `gated_kernels.chunk_codebook`, with separate parameters for queries and keys. All other arguments and the
    results are as in `gated_kernels.chunk_gla`. Features are never 0, so a token that is not to be written needs zeros
    in its values and log gates (and in the mask). Raises ValueError when H is not a multiple of G.
    """
    of_q, of_k = (q_proj_HDE, q_bias_HE, q_log_inv_temperature_H), (k_proj_GDE, k_bias_GE, k_log_inv_temperature_G)
    if q_BTHD.shape[2] % k_BTGD.shape[2]:
        raise ValueError(f"{q_BTHD.shape[2]} query heads are not a multiple of {k_BTGD.shape[2]} key-value heads")
    options: dict[str, Any] = {
        "write_mask_BTG": write_mask_BTG,
        "initial_state": initial_state,
        "segment_ids_BT": segment_ids_BT,
        "exclusive": exclusive,
    }
    kernel = kernel_for("codebook_gla")
    if kernel is not None and q_BTHD.shape[1] > 1:
        found = kernel(q_BTHD, k_BTGD, v_BTGV, log_a, *of_q, *of_k, codes_GFE, **options)
        if found is not None:
            return found
    q_BTHF, k_BTGF = chunk_codebook(q_BTHD, *of_q, codes_GFE), chunk_codebook(k_BTGD, *of_k, codes_GFE)
    return chunk_gla(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
