"""Gated linear attention with one gate per head as it is defined: the loop of `gla`, whose gate is the same for all
features."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gated_kernels.gla.naive import naive_gla


def naive_simple_gla(
    q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, log_a: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `gated_kernels.chunk_simple_gla`; computed in the dtype of the values, but at least in fp32."""
    assert log_a is None or log_a.shape[-1] == 1
    return naive_gla(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
