"""A linearized layer's step of one token in two Triton kernels, which take nothing from the host and can be captured.

A step moves few bytes, so its time is that of what waits for what. `read_kernel` has programs of two kinds, which need
nothing of each other: a piece of the features of a head, for 16 rows, which meet the codebook's matrices together;
and the window of a row and key-value head. Pieces are not normalised: their reader puts largest logits and sums
together, so that a large codebook is spread over the GPU. `write_kernel` goes through the state once: a program fetches
a tile of a row's state, in which it is alone, waits for the first kernel only then, writes the decayed state and reads
it with all query heads, and mixes that with the window. A few query heads are a multiplication and a sum over the
tile's rows, with neither a product's padding to 16 nor its way through shared memory; warps take rows, so that a thread
uses a feature for several columns. Only the first kernel reads the normaliser z, which every column's program would
need, and only the second one writes it. Where a GPU can, each kernel is launched while the one before it runs, has what
does not depend on that one brought near, and waits for it before it reads anything else: the first kernel waits, and
only then lets the second begin, so that nothing that came before the first is open when the second fetches the state.
Sums are in fp32, as are features and the state; products of fp32 are three TF32 ones.

Shapes: see chunk.py; R = H / G, S pieces of features. In a kernel: N rows of a product, K block of keys, BD and BF
block of channels and features, BV columns of a tile of the state, by BC, and the powers of two that hold them: CD
channels, CE of a code, CS pieces, PP slots of the ring.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gated_kernels.fused_step.chunk import StepCache, StepConfig, StepInputs
from gated_kernels.fused_step.read import read_kernel
from gated_kernels.fused_step.write import write_kernel

LEAST = 16  # rows or columns that a product takes


class LaunchConfig(NamedTuple):
    """What a program takes, by measurement on an H200 (kernels/results/step-h200.md). Of a codebook at most `codes`, by
    `channels` at a time; of the state at most `columns`, and of them `whole` numbers at once or else `part` at a time,
    of which two are under way: a warp for each `a_warp`, 4 at least. Of codes and columns fewer until there are
    `programs`."""

    codes: int = 128
    channels: int = 32
    read_warps: int = 4  # twice as many for heads of more than 256 bytes
    columns: int = 32
    programs: int = 128
    whole: int = 4096
    part: int = 8192
    a_warp: int = 1024


LAUNCH = LaunchConfig()


def triton_fused_step(token: StepInputs, cache: StepCache, config: StepConfig) -> Tensor:
    """See `gated_kernels.fused_step.chunk.step`."""
    (B, H, D), (_, P, G, _), F = token.q_BHD.shape, cache.k_BPGD.shape, cache.state_BGFD.shape[2]
    cos, sin, codes, gate, memory_weight = token.cos_BC, token.sin_BC, config.codes, config.gate, config.memory_weight
    q, k, v = (x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (token.q_BHD, token.k_BGD, token.v_BGD))
    visible = None if token.sink_visible_BM is None else token.sink_visible_BM.contiguous()
    cos_step = 0 if cos is None or len(cos) == 1 else cos.stride(0)
    new, R, CD = cache.state_BGFD.new_empty, H // G, _held(D)
    tiles = (H + G) * triton.cdiv(B, LEAST)
    piece = CD if codes is None else _piece(F, tiles)
    S = triton.cdiv(F, piece)
    logits, totals, window, lse = new(B, H + G, F), new(B, H + G), new(B, H, D), new(B, H)
    tops, sums, normalizers = new(B, H + G, S), new(B, H + G, S), new(B, H + G, S)
    o, E, FG = v.new_empty(B, H, D), 1 if codes is None else codes.codes_GFE.shape[2], 1
    if gate is not None and gate.bias_GF is not None:
        FG = gate.bias_GF.shape[1]
    BF, BV = _block_of_state(F, D, R, B * G)
    wide = CD * v.element_size() > 256
    overlap = o.is_cuda and _overlaps(o.device)
    sizes = {"G": G, "R": R, "D": D, "F": F, "P": P, "S": S, "CD": CD, "OVERLAP": overlap}
    sizes |= {"C": 0 if cos is None else cos.shape[1], "M": 0 if visible is None else visible.shape[1]}
    power, query_weight, memory_log = memory_weight or (None, None, None)
    with torch.cuda.device_of(o):
        read_kernel[(tiles * S + B * G,)](
            q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, cos_step, token.position_BS, visible,
            *cache[:5], cache.z_BGF, cache.ring_position, *(codes or (None,) * 7), query_weight,
            logits, totals, tops, sums, normalizers, window, lse, token.scale, B,
            **sizes, E=E, CE=_held(E), BD=min(LAUNCH.channels, CD), BF=piece, N=_held(R), K=16 if wide else 64,
            SINKS=LEAST, ROWS=LEAST, PP=triton.next_power_of_2(P),
            num_warps=LAUNCH.read_warps * (2 if wide else 1), launch_pdl=overlap,
        )  # fmt: skip
        write_kernel[(B * G, triton.cdiv(D, BV))](
            k, v, k.stride(0), v.stride(0), cos, sin, cos_step, token.position_BS, *cache,
            None if gate is None else gate.bias_GF, power, memory_log,
            logits, totals, tops, sums, normalizers, window, lse, o, 1.0 if gate is None else gate.normalizer, D**-0.5,
            **sizes, GATE=None if gate is None else gate.of, SHARED=memory_weight is not None, FG=FG,
            CS=triton.next_power_of_2(S), N=triton.next_power_of_2(R), BF=BF, BV=BV, BC=min(BV, 32),
            num_warps=max(4, BF * BV // LAUNCH.a_warp), launch_pdl=overlap,
        )  # fmt: skip
    return o


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin while the one before it still runs, and wait for it where it has to."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _held(size: int) -> int:
    return max(LEAST, triton.next_power_of_2(size))


def _piece(F: int, tiles: int) -> int:
    """How many codes a program takes."""
    return _spread(min(LAUNCH.codes, _held(F)), F, 2 * LEAST, tiles)


def _spread(most: int, size: int, least: int, times: int) -> int:
    """What a program takes of `size`, so that there are programs enough, when each takes one of so many `times`."""
    while most > least and times * triton.cdiv(size, most) < LAUNCH.programs:
        most //= 2
    return most


def _block_of_state(F: int, D: int, R: int, heads: int) -> tuple[int, int]:
    """BF and BV: few enough columns for many programs, and all rows at once where registers hold them."""
    BV = _spread(min(LAUNCH.columns, _held(D)), D, LEAST, heads)
    BF = _held(F) if _held(F) * BV <= LAUNCH.whole else LAUNCH.part // BV
    return min(BF, 128 if R > 8 else BF), BV  # many query heads take a matrix product
