"""The definition of the codebook's feature map, one head after another.

Shapes: B batch, T tokens, N heads, G heads with codes of their own, D head size, E size of a code, F codes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_codebook(
    x_BTND: Tensor, proj_NDE: Tensor, bias_NE: Tensor, log_inv_temperature_N: Tensor, codes_GFE: Tensor
) -> Tensor:
    """See `gated_kernels.chunk_codebook`. Computed in the dtype of the vectors, but in at least fp32."""
    dtype = torch.promote_types(x_BTND.dtype, torch.float32)
    x, proj, bias, log_inv_temperature, codes = (
        x.to(dtype) for x in (x_BTND, proj_NDE, bias_NE, log_inv_temperature_N, codes_GFE)
    )
    maps = []
    for n in range(x.shape[2]):
        y_BTE = x[:, :, n] @ proj[n] + bias[n]
        u_BTE = log_inv_temperature[n].exp() * y_BTE / y_BTE.norm(dim=-1, keepdim=True)
        maps.append((u_BTE @ codes[n * len(codes) // x.shape[2]].mT).softmax(-1))
    return torch.stack(maps, 2).to(x_BTND.dtype)
