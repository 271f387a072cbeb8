"""A linearized layer's decoding step in two Triton kernels. They read nothing on the host, so they can be captured.

A step moves few bytes, so latency dominates: its time depends on what waits for what.

`read_kernel` has two kinds of programs, which are independent of each other. Those of the first kind compute pieces of
a head's features, for 16 batch rows that share the codebook's matrices. Those of the second kind compute the window of
one row and key-value head. Pieces of features are not normalized. Instead, `write_kernel` combines their largest logits
and sums, so that a large codebook is spread over the GPU.

`write_kernel` makes one pass over the state. A program loads a tile of a row's state, which no other program touches,
and only then waits for the first kernel. It writes the decayed state, reads it with all query heads, and mixes the
result with the window. With few query heads the read is a multiplication and a sum over the tile's rows, because a
matrix product would pad to 16 rows and go through shared memory. Warps are distributed over rows, so that a thread uses
each feature for several columns. Only the first kernel reads the normalizer z, which the programs of all columns would
need, and only the second one writes it.

A row's cache may be a page elsewhere (see pages.py), and the slot of its oldest token may be its own.

If the GPU supports it (programmatic dependent launch), each kernel is launched while the one before it still runs. It
prefetches data that does not depend on that one, and waits for it before it reads anything else. The first kernel waits
before it lets the second begin. So everything from before the first kernel is complete when the second loads the state.
Programs that wait take up room: with many rows and a state of several tiles, kernels run one after the other.

Features, the state and sums are in fp32. Products of fp32 operands are three TF32 products, or two where TF32 holds
one operand.

Shapes: see arguments.py; R = H / G, S pieces of features, of which a program computes T. In a kernel: N rows of a
product, K keys in a block, BD channels and BF features in a block, BV columns of a tile of the state, in groups of BC.
Powers of two that hold sizes: CD channels, CE size of a code, CS pieces, PP slots of the ring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gated_kernels.common import chips
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.fused_step.arguments import StepCache, StepConfig, StepInputs
from gated_kernels.fused_step.read import read_kernel
from gated_kernels.fused_step.write import write_kernel

LEAST = 16  # fewest rows or columns of a matrix product


class LaunchConfig(NamedTuple):
    """How much work a program takes, measured on an H200 and an H100 (kernels/results/step-h200.md)."""

    codes: int = 64  # of a codebook in a piece, at most; more where it has more than 16 such pieces
    pieces: int = 8  # of a program, at most
    channels: int = 32  # of its projections at a time
    read_warps: int = 4  # twice as many for heads of more than 256 bytes
    columns: int = 32  # of the state, at most
    programs: int = 128  # codes, pieces and columns are halved until there are as many programs
    whole: int = 8192  # elements up to which all rows of these columns are one tile
    part: int = 8192  # elements of a tile if they are more; two tiles are then in flight
    a_warp: int = 2048  # elements of a tile per warp; there are at least 4 warps
    registers: int = 128  # of a thread where all rows are one tile: four programs then share a multiprocessor
    early: int = 128  # rows times heads up to which kernels overlap where a state is several tiles


LAUNCH = LaunchConfig()


def triton_fused_step(token: StepInputs, cache: StepCache, config: StepConfig) -> Tensor:
    """See `gated_kernels.fused_step.chunk.fused_step`."""
    (B, H, D), (_, P, G, _), F = token.q_BHD.shape, cache.k_NPGD.shape, cache.state_NGFD.shape[2]
    cos, sin, codes, gate, memory_weight = token.cos_BC, token.sin_BC, config.codes, config.gate, config.memory_weight
    q, k, v = (x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (token.q_BHD, token.k_BGD, token.v_BGD))
    visible = None if token.sink_visible_BM is None else token.sink_visible_BM.contiguous()
    cos_step = 0 if cos is None or len(cos) == 1 else cos.stride(0)
    new, R, CD = cache.state_NGFD.new_empty, H // G, _held(D)
    tiles = (H + G) * cdiv(B, LEAST)
    piece, T = (CD, 1) if codes is None else _pieces(F, tiles)
    S = cdiv(F, piece)
    logits, totals, window, lse = new(B, H + G, F), new(B, H + G), new(B, H, D), new(B, H)
    tops, sums, normalizers = new(B, H + G, S), new(B, H + G, S), new(B, H + G, S)
    o, E, FG = v.new_empty(B, H, D), 1 if codes is None else codes.codes_GFE.shape[2], 1
    if gate is not None and gate.bias_GF is not None:
        FG = gate.bias_GF.shape[1]
    heads = B * G
    BF, BV = _block_of_state(F, D, R, heads)
    wide = CD * v.element_size() > 256
    overlap = chips.overlaps_launches(o.device) and (BF >= F or heads <= LAUNCH.early)
    sizes = {"G": G, "R": R, "D": D, "F": F, "P": P, "S": S, "CD": CD, "OVERLAP": overlap}
    sizes |= {"C": 0 if cos is None else cos.shape[1], "M": 0 if visible is None else visible.shape[1]}
    power, query_weight, memory_log = memory_weight or (None, None, None)
    position_step = None if cache.ring_position.numel() == 1 else cache.ring_position.stride(0)
    places = cache.row_B, *cache.strides, cache.ring_position, position_step
    with torch.cuda.device_of(o):
        read_kernel[(tiles * cdiv(S, T) + B * G,)](
            q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, cos_step, token.position_BS, visible,
            *cache[:5], cache.z_NGF, *places, *(codes or (None,) * 7), query_weight,
            logits, totals, tops, sums, normalizers, window, lse, token.scale, B,
            **sizes, T=T, E=E, CE=_held(E), BD=min(LAUNCH.channels, CD), BF=piece, N=_held(R),
            K=16 if wide else 64, SINKS=LEAST, ROWS=LEAST, PP=next_power_of_2(P),
            num_warps=LAUNCH.read_warps * (2 if wide else 1), launch_pdl=overlap,
        )  # fmt: skip
        write_kernel[(cdiv(D, BV), B * G)](
            k, v, k.stride(0), v.stride(0), cos, sin, cos_step, token.position_BS, *cache[:7], *places,
            None if gate is None else gate.bias_GF, power, memory_log,
            logits, totals, tops, sums, normalizers, window, lse, o, 1.0 if gate is None else gate.normalizer, D**-0.5,
            **sizes, GATE=None if gate is None else gate.of, SHARED=memory_weight is not None, FG=FG,
            CS=next_power_of_2(S), N=next_power_of_2(R), BF=BF, BV=BV, BC=min(BV, 32),
            num_warps=max(4, BF * BV // LAUNCH.a_warp), launch_pdl=overlap,
            maxnreg=LAUNCH.registers if BF >= F else None,
        )  # fmt: skip
    return o


def _held(size: int) -> int:
    return max(LEAST, next_power_of_2(size))


def _pieces(F: int, tiles: int) -> tuple[int, int]:
    """How many codes a piece has, and how many pieces a program takes."""
    piece = _spread(min(max(LAUNCH.codes, _held(F) // 16), _held(F)), F, 2 * LEAST, tiles)
    return piece, _spread(LAUNCH.pieces, cdiv(F, piece), 1, tiles)


def _spread(most: int, size: int, least: int, times: int) -> int:
    """How much of `size` a program takes, between `least` and `most`: less until `times` such splits give enough
    programs."""
    while most > least and times * cdiv(size, most) < LAUNCH.programs:
        most //= 2
    return most


def _block_of_state(F: int, D: int, R: int, heads: int) -> tuple[int, int]:
    """BF and BV: few enough columns for many programs, and all rows at once if they fit into registers."""
    BV = _spread(min(LAUNCH.columns, _held(D)), D, LEAST, heads)
    BF = _held(F) if _held(F) * BV <= LAUNCH.whole else LAUNCH.part // BV
    return min(BF, 128 if R > 8 else BF), BV  # many query heads are read by a matrix product
