"""How the Triton paths of gla, simple_gla, codebook_gla and delta_rule check and prepare their arguments.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size.
"""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from gated_kernels.common.tiles import PRODUCTS


class Sizes(NamedTuple):
    """The sizes of one call."""

    B: int
    T: int
    H: int
    G: int
    F: int
    V: int


def sizes_of(q_BTHF: Tensor, v_BTGV: Tensor) -> Sizes:
    B, T, H, F = q_BTHF.shape
    return Sizes(B, T, H, v_BTGV.shape[2], F, v_BTGV.shape[3])


def promoted(*tensors: Tensor) -> torch.dtype:
    """The dtype that all of them promote to."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors))


def is_per_head(log_a: Tensor | None) -> bool:
    """Whether there is one gate per head, or none."""
    return log_a is None or log_a.shape[-1] == 1


def unfit(device: torch.device, *expected: tuple[Tensor | None, tuple[int, ...]]) -> str | None:
    """What is wrong with the first tensor of an unexpected shape or device, or None. A kernel would read out of its
    bounds."""
    for x, shape in expected:
        if x is not None and (x.shape != shape or x.device != device):
            return f"{tuple(x.shape)} on {x.device} where {tuple(shape)} on {device} is due"
    return None


def unfit_options(
    sizes: Sizes,
    device: torch.device,
    log_a: Tensor | None,
    write_mask_BTG: Tensor | None,
    initial_state: Tensor | None,
    segment_ids_BT: Tensor | None,
    q_lse_BTH: Tensor | None = None,
) -> str | None:
    """Same as `unfit`, for all arguments but queries, keys and values."""
    B, T, H, G, F, V = sizes
    return unfit(
        device,
        (log_a, (B, T, G, 1 if is_per_head(log_a) else F)),
        (write_mask_BTG, (B, T, G)),
        (initial_state, (B, G, F, V + (write_mask_BTG is not None))),
        (segment_ids_BT, (B, T)),
        (q_lse_BTH, (B, T, H)),
    )


def unsupported(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    write_mask_BTG: Tensor | None,
    initial_state: Tensor | None,
    segment_ids_BT: Tensor | None,
    q_lse_BTH: Tensor | None,
) -> str | None:
    """What the kernels do not support in these arguments, or None."""
    if (dtype := promoted(q_BTHF, k_BTGF, v_BTGV)) not in PRODUCTS:
        return f"inputs in {str(dtype).removeprefix('torch.')}"
    B, T, _, G, F, V = sizes = sizes_of(q_BTHF, v_BTGV)
    options = log_a, write_mask_BTG, initial_state, segment_ids_BT, q_lse_BTH
    device = q_BTHF.device
    return unfit(device, (k_BTGF, (B, T, G, F)), (v_BTGV, (B, T, G, V))) or unfit_options(sizes, device, *options)


def first_state(v: Tensor, features: int, write_mask: Tensor | None, state: Tensor | None) -> Tensor:
    """The given state, or zeros, in fp32: [B, G, F, V], with one more column if there is a `write_mask`."""
    if state is not None:
        return state.float()
    B, _, G, V = v.shape
    return v.new_zeros(B, G, features, V + (write_mask is not None), dtype=torch.float32)


def with_mask_column(v: Tensor, write_mask: Tensor) -> Tensor:
    """The values with the mask as one more column, whose output is the normalizer, for kernels that compute none."""
    return torch.cat((v, write_mask[..., None].to(v.dtype)), -1)


def features_of(q: Tensor, q_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(q - lse), materialized for kernels that do not compute it themselves."""
    return (q - q_lse[..., None]).exp().to(dtype)


@functools.cache
def warn_once(op: str, why: str, instead: str = "in torch") -> None:
    warnings.warn(f"{op} runs {instead}, because its Triton kernels do not support {why}", stacklevel=4)
