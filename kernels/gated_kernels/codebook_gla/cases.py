"""Test inputs for the recurrence over a codebook, and other ways to get the same result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gated_kernels.codebook import cases as codebook
from gated_kernels.gla import cases as gla
from gated_kernels.splits import in_pieces, one_by_one

__all__ = ["CASES", "in_pieces", "inputs", "one_by_one"]


class Case(NamedTuple):
    sizes: gla.Case  # of the recurrence
    D: int = 16
    log_inv_temperature: float = 2.0


def _case(T: int, D: int = 16, **sizes: Any) -> Case:
    return Case(gla.Case(T, per_head=True, **sizes), D)


CASES = {  # with so many heads that gradients with one number per head are not exact by luck
    "one token": _case(1, G=8),
    "one token, exclusive, bf16": _case(1, exclusive=True, dtype=torch.bfloat16),
    "two tokens, no state": _case(2, G=8, state=False),
    "a token more than a chunk": _case(33, G=6, F=40, gate="mixed"),
    "no decay, exclusive, segments": _case(70, G=6, gate="none", exclusive=True, segments=True),
    "segments, exclusive, float64": _case(97, segments=True, exclusive=True, dtype=torch.float64),
    "normalizer, one token": _case(1, G=8, normalizer=True),
    "normalizer, segments": _case(83, G=6, gate="mixed", segments=True, normalizer=True),
    "heads of 64, bf16": _case(130, D=64, F=128, V=64, normalizer=True, exclusive=True, dtype=torch.bfloat16),
    "many codes, bf16": _case(70, D=64, G=1, F=300, V=64, normalizer=True, exclusive=True, dtype=torch.bfloat16),
    "a gate per feature, bf16": Case(gla.Case(40, F=32, dtype=torch.bfloat16)),
    "normalizer, a gate per feature, bf16": Case(gla.Case(40, F=32, normalizer=True, dtype=torch.bfloat16)),
}


def inputs(case: Case) -> dict[str, Any]:
    s = case.sizes
    made = {
        side: codebook.inputs(
            codebook.Case(
                s.T, G=s.G, R=R, D=case.D, F=s.F, log_inv_temperature=case.log_inv_temperature, dtype=s.dtype, B=s.B
            )
        )
        for side, R in (("q", s.R), ("k", 1))
    }
    q, k = made["q"], made["k"]
    rest = gla.inputs(s)
    return {
        "q_BTHD": q["x_BTND"],
        "k_BTGD": k["x_BTND"],
        "q_proj_HDE": q["proj_NDE"],
        "q_bias_HE": q["bias_NE"],
        "q_log_inv_temperature_H": q["log_inv_temperature_N"],
        "k_proj_GDE": k["proj_NDE"],
        "k_bias_GE": k["bias_NE"],
        "k_log_inv_temperature_G": k["log_inv_temperature_N"],
        "codes_GFE": k["codes_GFE"],
        **{name: x for name, x in rest.items() if name not in ("q_BTHF", "k_BTGF")},
    }
