"""RMS norms of a family in one kernel each, for steps that are captured as CUDA graphs.

A family's module runs some eight kernels, which read and write the hidden states each time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from gated_kernels.common.registry import kernel_for
from torch import Tensor, nn

from liger_convert.model.fused_modules import Forward, by_class

ROUNDING = 8.0  # allowed difference in units of the last place, as the kernel adds up in another order
SELDOM = 0.02  # the share of values in half precision that may be rounded otherwise for that reason


def fused_norms(roots: Iterable[nn.Module]) -> dict[nn.Module, Forward]:
    """The norms below these modules that the kernel computes as they do, and what runs instead of their forward.

    Families differ in what they multiply by and where they round. So a norm of each class is tried on random numbers.
    This reads a value on the host.
    """
    if kernel_for("rms_norm") is None:
        return {}
    found: dict[nn.Module, Forward] = {}
    tried: dict[tuple[type, torch.dtype], bool] = {}
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        if "RMSNorm" not in type(module).__name__ or _eps(module) is None:
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.is_meta or "forward" in vars(module):
            continue
        kind = type(module), weight.dtype
        if kind not in tried:
            tried[kind] = _is_same(module, weight)
        if tried[kind]:
            found[module] = functools.partial(_forward, module)
    return found


def _forward(norm: nn.Module, x: Tensor) -> Tensor:
    found = _in_kernel(norm, x)
    if found is None:
        found = by_class(norm, x)
    return found


def _in_kernel(norm: Any, x: Tensor) -> Tensor | None:
    kernel = kernel_for("rms_norm")
    found: Tensor | None = None if kernel is None else kernel(x, norm.weight, _eps(norm))
    return found


def _eps(norm: Any) -> float | None:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


@torch.no_grad()
def _is_same(norm: nn.Module, weight: Tensor) -> bool:
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(16, weight.shape[-1], device=weight.device, generator=generator).to(weight.dtype)
    found, wanted = _in_kernel(norm, x), by_class(norm, x)
    if found is None or wanted.dtype != found.dtype or wanted.shape != found.shape:
        return False
    if weight.dtype != torch.float32 and (found != wanted).float().mean() > SELDOM:
        return False  # such as norms that round only after they have multiplied by the weight
    allowed = ROUNDING * torch.finfo(weight.dtype).eps * wanted.float().abs()
    return bool(((found.float() - wanted.float()).abs() <= allowed).all())
