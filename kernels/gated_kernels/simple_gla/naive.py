"""The definition of gated linear attention with one gate per head: the loop of `gla`, with the same gate for all
features."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gated_kernels.gla.naive import naive_gla


def naive_simple_gla(
    q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, log_a: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `gated_kernels.chunk_simple_gla`. Computed in the dtype of the values, but in at least fp32."""
    assert log_a is None or log_a.shape[-1] == 1
    return naive_gla(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
