"""Inputs on which the delta rule is tested: those of gated linear attention, with keys that look up and erase."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf

from gated_kernels.gla import cases as gla
from gated_kernels.simple_gla import cases as simple_gla
from gated_kernels.splits import in_pieces, one_by_one

__all__ = ["CASES", "in_pieces", "inputs", "one_by_one"]


SIZES = gla.CASES | simple_gla.CASES


class Case(NamedTuple):
    sizes: gla.Case
    erases_elsewhere: bool = False  # along another key than the one it writes
    one_key: bool = False  # all tokens overwrite each other


CASES = {
    **{name: Case(sizes) for name, sizes in SIZES.items() if not (sizes.normalizer or sizes.q_lse)},
    **{
        f"erases elsewhere, {name}": Case(SIZES[name], erases_elsewhere=True)
        for name in (
            "one token",
            "one token, exclusive",
            "three tokens, float64",
            "a token more than a chunk",
            "long, bf16",
            "no decay, exclusive, segments",
            "strong, exclusive",
            "-200 and 0",
            "segments, -200 and 0",
            "per head",
        )
    },
    "one key": Case(gla.Case(97), one_key=True),
    "one key, no decay": Case(gla.Case(130, gate="none"), one_key=True),
}


def inputs(case: Case) -> dict[str, Any]:
    x = gla.inputs(case.sizes)
    random = torch.Generator().manual_seed(case.sizes.T + 1)
    k = x["k_BTGF"].double()
    r = nnf.normalize(k[:, :1].expand_as(k) if case.one_key else k, dim=-1)
    strength = torch.rand(*k.shape[:3], 1, generator=random, dtype=k.dtype)
    x["r_BTGF"] = r.to(case.sizes.dtype)
    x["e_BTGF"] = None
    if case.erases_elsewhere:
        x["e_BTGF"] = (r * torch.rand(k.shape, generator=random, dtype=k.dtype)).to(case.sizes.dtype)
    else:
        x["k_BTGF"] = (r * strength).to(case.sizes.dtype)
    return x
