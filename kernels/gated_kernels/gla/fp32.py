"""Launches the Triton kernels of gated linear attention with a gate per feature and inputs in fp32 or fp16.

First a scan computes the state before every chunk, then all chunks' outputs are computed in parallel. Within a chunk,
the score of tokens t and s is q_t k_s times every decay after s up to t. It is computed at the one level at which t and
s lie in the second and the first half of the same block. Both decays are taken to the boundary between the halves.
Each is the exponential of a sum of log gates, and so at most 1 however strong the gates are. A level is one masked
matrix product of the whole chunk.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. A tile has BF features and BV values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_kernels.common.gated_inputs import promoted, sizes_of
from gated_kernels.common.integers import cdiv
from gated_kernels.common.tiles import PRODUCTS
from gated_kernels.gla.fp32_kernels import dqk_kernel, dstates_kernel, dv_kernel, outputs_kernel, states_kernel

CHUNK = 32
KERNELS = {
    "states": states_kernel,
    "outputs": outputs_kernel,
    "dstates": dstates_kernel,
    "dv": dv_kernel,
    "dqk": dqk_kernel,
}


def constants(G: int, R: int, F: int, V: int, exclusive: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The kernels' constexprs and launch options. They follow from the sizes and the dtype; there is no autotuning."""
    return {
        "G": G,
        "R": R,
        "F": F,
        "V": V,
        "EXCLUSIVE": int(exclusive),
        "C": CHUNK,
        "BF": _block(F),
        "BV": _block(V),
        "LEVELS": CHUNK.bit_length() - 1,
        "PRECISION": PRODUCTS[dtype][1],
        "num_warps": 8 if PRODUCTS[dtype][0] == torch.float32 else 4,
    }


def _block(size: int) -> int:
    """Tile size: 64, or 32 where that needs less padding, as for 65 and 80."""
    return 32 if 0 < size % 64 <= 32 else 64


class _Call:
    """The sizes of one call, its launch grids and the scan over its states."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, exclusive: bool):
        B, self.T, H, G, F, V = sizes_of(q, v)
        dtype = promoted(q, k, v)
        N = cdiv(self.T, CHUNK)
        self.states = v.new_empty(B, G, N, F, V, dtype=PRODUCTS[dtype][0])
        blocks_of_F, blocks_of_V = cdiv(F, _block(F)), cdiv(V, _block(V))
        self.by_state, self.by_query = (B * G, blocks_of_F, blocks_of_V), (B * H * N,)
        self.by_feature, self.by_value = (B * G * N, blocks_of_F), (B * G * N, blocks_of_V)
        self.constants = constants(G, H // G, F, V, exclusive, dtype)

    def scan(self, k: Tensor, v: Tensor, log_a: Tensor, segment: Tensor | None, state: Tensor) -> Tensor:
        """Fills `states` and returns the last state."""
        last = torch.empty_like(state)
        states_kernel[self.by_state](k, v, log_a, segment, state, self.states, last, self.T, **self.constants)
        return last


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, state: Tensor, segment: Tensor | None, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    call = _Call(q, k, v, exclusive)
    last = call.scan(k, v, log_a, segment, state)
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    outputs_kernel[call.by_query](q, k, v, log_a, segment, call.states, o, call.T, **call.constants)
    return o, last


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, log_a and the state."""
    call = _Call(q, k, v, exclusive)
    T, compiled_for = call.T, call.constants
    states, dstates = call.states, torch.empty_like(call.states)
    dq, dk, dv, dlog_a, dstate = (torch.empty_like(x) for x in (q, k, v, log_a, state))
    call.scan(k, v, log_a, segment, state)
    dstates_kernel[call.by_state](q, log_a, segment, do, dlast, dstates, dstate, T, **compiled_for)
    dv_kernel[call.by_value](q, k, log_a, segment, do, dstates, dv, T, **compiled_for)
    dqk_kernel[call.by_feature](
        q, k, v, log_a, segment, do, states, dstates, dq, dk, dlog_a, T, **compiled_for
    )  # fmt: skip
    return dq, dk, dv, dlog_a, dstate
