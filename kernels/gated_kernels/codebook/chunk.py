"""A codebook's feature map in torch: phi(x) = softmax(u C / temperature), where u is P x + b normalized to length 1.

Shapes: B batch, T tokens, N heads (query or key-value), G heads with codes of their own, D head size, E size of a code,
F codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gated_kernels.common.derivatives import unit
from gated_kernels.common.registry import kernel_for


def chunk_codebook(
    x_BTND: Tensor, proj_NDE: Tensor, bias_NE: Tensor, log_inv_temperature_N: Tensor, codes_GFE: Tensor
) -> Tensor:
    """phi(x) [B,T,N,F] in x's dtype: weights, summing to 1, of how close x is to each of F codes after the head's
    projection.

    Head n uses the codes n // (N / G). Computes in fp32 (fp64 for fp64 vectors), even under autocast. Raises ValueError
    when N is not a multiple of G.
    """
    heads, groups = x_BTND.shape[2], len(codes_GFE)
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of the {groups} that have codes")
    kernel = kernel_for("codebook")
    if kernel is not None:
        found = kernel(x_BTND, proj_NDE, bias_NE, log_inv_temperature_N, codes_GFE)
        if found is not None:
            return found
    dtype = torch.promote_types(x_BTND.dtype, torch.float32)
    with torch.autocast(x_BTND.device.type, enabled=False):
        u_BTNE = unit_projection(x_BTND, proj_NDE, bias_NE) * log_inv_temperature_N.to(dtype).exp()[:, None]
        u_BMGE = u_BTNE.unflatten(2, (groups, -1)).transpose(2, 3).flatten(1, 2)  # M = T N / G
        phi_BMGF = per_head(u_BMGE, codes_GFE.to(dtype).mT).softmax(-1)
        return phi_BMGF.unflatten(1, (u_BTNE.shape[1], -1)).transpose(2, 3).flatten(2, 3).to(x_BTND.dtype)


def unit_projection(x_BTND: Tensor, proj_NDE: Tensor, bias_NE: Tensor) -> Tensor:
    """u [B,T,N,E]: the projected vectors, normalized to length 1, in at least fp32."""
    dtype = torch.promote_types(x_BTND.dtype, torch.float32)
    with torch.autocast(x_BTND.device.type, enabled=False):
        return unit(per_head(x_BTND.to(dtype), proj_NDE.to(dtype)) + bias_NE.to(dtype))


def per_head(x_BTND: Tensor, w_NDE: Tensor) -> Tensor:
    """[B,T,N,E]: each head's vectors times the head's matrix. Takes half as long as einsum for one token."""
    return (x_BTND.flatten(0, 1).transpose(0, 1) @ w_NDE).transpose(0, 1).unflatten(0, x_BTND.shape[:2])
