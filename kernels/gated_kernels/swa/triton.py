"""Sliding-window attention with sinks in three Triton kernels: the same function as in `chunk.py`, on a GPU.

The R query heads of a key-value head are treated as rows: row n is query n // R of head n % R. In the forward kernel
and the kernel of dq, a program handles a block of rows. It holds the sinks and all keys in the rows' windows at once if
they fit into registers, and otherwise loops over blocks of them. A memory's output is added at the end.

In the kernel of dk and dv, a program handles a block of keys and loops over the rows that may see them. Where the
kernel of dq loops over blocks, and so does not compute the sinks' gradients, this kernel is launched again for blocks
of sinks. It does not read the memory's output, because the log-sum-exp includes the memory's logit. The log-sum-exp is
all that is saved besides the inputs.

Products take operands in the inputs' dtype and accumulate in fp32, and the softmax is in fp32. No two programs write to
the same element, so gradients are deterministic.

Shapes: B batch, T queries, S = P + T keys, H query heads, G key-value heads, R = H / G, D head size, V value size,
M sinks. In a kernel: N block of rows, K block of keys or sinks, C and E the powers of two that hold D and V.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_kernels.common import chips
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tracing import launches_at_once
from gated_kernels.swa.kernels import backward_k_kernel, backward_q_kernel, forward_kernel

SINKS = 16  # sinks in a block
PROGRAMS = 1024  # target for the gradients of the sinks, which sum over all rows: enough to fill a GPU


class Block(NamedTuple):
    rows: int
    keys: int
    warps: int
    at_once: int = 0  # how many blocks of keys fit into registers at once
    looped: int = 0  # keys in a block if a block of rows may see more than that; 0: `keys`


class Blocks(NamedTuple):
    """Block sizes of the forward kernel, and of the kernels of the gradients of queries and of keys."""

    forward: Block
    queries: Block
    keys: Block


# By bytes per element and the larger of C and E. For two bytes and heads of up to 128: the fastest on an H200 with a
# window of 64. Otherwise: what the compiler reports to fit into registers, or nearly. Windows are only a few blocks
# long, so loops are not pipelined.
BLOCKS = {
    (2, 64): Blocks(Block(64, 16, 4, 6, 32), Block(64, 32, 4, 3), Block(64, 32, 4)),
    (2, 128): Blocks(Block(64, 16, 4, 6, 32), Block(64, 32, 4, 3), Block(64, 64, 4)),
    (2, 256): Blocks(*3 * [Block(32, 32, 8)]),
    (4, 64): Blocks(*3 * [Block(32, 32, 8)]),
    (4, 128): Blocks(*3 * [Block(32, 16, 8)]),
    (4, 256): Blocks(*3 * [Block(16, 16, 8)]),
    (4, 512): Blocks(*3 * [Block(16, 16, 8)]),
}
# Where chips that multiply in registers differ (see common/chips.py): by what the compiler reports, not measured.
BLOCKS_IN_REGISTERS = BLOCKS | {
    (2, 128): Blocks(Block(32, 16, 4, 6, 32), Block(32, 32, 8, 4), Block(64, 64, 8)),
}


def forward(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    valid_BS: Tensor | None,
    segment_ids_BS: Tensor | None,
    sink_k_BMGD: Tensor | None,
    sink_v_BMGV: Tensor | None,
    visible_BTM: Tensor | None,
    memory_BTHV: Tensor | None,
    normalizer_BTH: Tensor | None,
    memory_logit_BTH: Tensor | None,
    mix_weight_H: Tensor | None,
    window_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """-> o_BTHV, lse_BTH"""
    (B, T, H, _), V = q_BTHD.shape, v_BSGV.shape[3]
    o, lse = q_BTHD.new_empty(B, T, H, V, dtype=v_BSGV.dtype), q_BTHD.new_empty(B, T, H, dtype=torch.float32)
    masks = valid_BS, segment_ids_BS, sink_k_BMGD, sink_v_BMGV, visible_BTM
    blocks, numbers, sizes = _plan(q_BTHD, k_BSGD, v_BSGV, sink_k_BMGD, window_size)
    tensors = _plain(q_BTHD, k_BSGD, v_BSGV, *masks, memory_BTHV, normalizer_BTH, memory_logit_BTH, mix_weight_H)
    with torch.cuda.device_of(q_BTHD):
        forward_kernel[cdiv(T * sizes["R"], blocks.forward.rows), sizes["G"], B](
            *tensors, o, lse, scale, *numbers, **sizes,
            **_launch_rows(blocks.forward, sizes["R"], window_size, numbers[2]),
            ALIGNED=T % 16 == 0 and k_BSGD.shape[1] % 16 == 0,
        )  # fmt: skip
    return o, lse


def backward(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    valid_BS: Tensor | None,
    segment_ids_BS: Tensor | None,
    sink_k_BMGD: Tensor | None,
    sink_v_BMGV: Tensor | None,
    visible_BTM: Tensor | None,
    memory_BTHV: Tensor | None,
    normalizer_BTH: Tensor | None,
    memory_logit_BTH: Tensor | None,
    mix_weight_H: Tensor | None,
    window_size: int,
    scale: float,
    lse_BTH: Tensor,
    do_BTHV: Tensor,
    dlse_BTH: Tensor,
) -> list[Tensor]:
    """-> the gradients of q, k, v, the sinks, the memory, its normalizer and its weight, as far as these are given."""
    masks = valid_BS, segment_ids_BS, sink_k_BMGD, sink_v_BMGV, visible_BTM
    blocks, numbers, sizes = _plan(q_BTHD, k_BSGD, v_BSGV, sink_k_BMGD, window_size)
    (T, S, M, _), (B, G, R) = numbers, (len(q_BTHD), sizes["G"], sizes["R"])
    q, k, v, valid, segment, sink_k, sink_v, visible = _plain(q_BTHD, k_BSGD, v_BSGV, *masks)
    contribution = memory, normalizer, _, _ = _plain(memory_BTHV, normalizer_BTH, memory_logit_BTH, mix_weight_H)
    lse, do, dlse = _plain(lse_BTH, do_BTHV, dlse_BTH)
    dq, dk, dv, mean = (torch.empty_like(x) for x in (q, k, v, lse))
    dmemory, dnormalizer = (None if x is None else torch.empty_like(x) for x in (memory, normalizer))
    dweight = None if memory is None else torch.empty_like(lse)
    by_rows, dsinks, part_size = _launch_rows(blocks.queries, R, window_size, M), [], blocks.queries.rows
    in_passing = by_rows["BLOCKS"] > 0  # whether the kernel of dq also computes the sinks' gradients
    if sink_k is not None:
        if not in_passing:
            row_blocks, programs = cdiv(T * R, blocks.keys.rows), B * G * cdiv(M, SINKS)
            part_size = cdiv(row_blocks, max(PROGRAMS // max(programs, 1), 1)) * blocks.keys.rows
        parts = cdiv(T * R, part_size)
        dsinks = [q.new_empty(parts, *x.shape, dtype=torch.float32) for x in (sink_k, sink_v)]
    with torch.cuda.device_of(q):
        backward_q_kernel[cdiv(T * R, blocks.queries.rows), G, B](
            q, k, v, valid, segment, sink_k, sink_v, visible, *contribution, lse, do, dlse,
            dq, mean, dmemory, dnormalizer, dweight, *(dsinks if dsinks and in_passing else (None, None)), scale,
            *numbers, **sizes, **by_rows,
        )  # fmt: skip
        backward_k_kernel[cdiv(S, blocks.keys.keys), G, B](
            q, k, v, valid, segment, None, lse, do, mean, dk, dv, scale, T, S, window_size, 0,
            **sizes, **_launch(blocks.keys),
        )  # fmt: skip
        if dsinks and not in_passing:
            backward_k_kernel[cdiv(M, SINKS), G * len(dsinks[0]), B](
                q, sink_k, sink_v, None, None, visible, lse, do, mean, *dsinks,
                scale, T, M, window_size, part_size, **sizes, **_launch(blocks.keys._replace(keys=SINKS)),
            )  # fmt: skip
    grads = [dq, dk, dv, *(x.sum(0).to(like.dtype) for x, like in zip(dsinks, (q, v)))]
    if mix_weight_H is not None and dweight is not None:
        dweight = dweight.sum((0, 1))
    return [*grads, *(x for x in (dmemory, dnormalizer, dweight) if x is not None)]


def _plain(*tensors: Tensor | None) -> list[Any]:
    """The tensors as a kernel can address them: contiguous, booleans as bytes."""
    dense = [None if x is None else x.contiguous() for x in tensors]
    return [x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in dense]


def _size(q: Tensor, v: Tensor) -> tuple[int, int]:
    """The key of BLOCKS."""
    channels = next_power_of_2(max(q.shape[3], v.shape[3], 64))
    return max(q.element_size(), v.element_size()), channels


def _plan(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, window_size: int
) -> tuple[Blocks, tuple, dict[str, int]]:
    """The blocks, the kernels' numbers T, S, M, window, and their constants."""
    (T, H, D), (S, G), V = q.shape[1:], k.shape[1:3], v.shape[3]
    C, E = (max(next_power_of_2(size), 16) for size in (D, V))
    blocks = (BLOCKS_IN_REGISTERS if chips.multiplies_in_registers(q.device) else BLOCKS)[_size(q, v)]
    sizes = {"G": G, "R": H // G, "D": D, "V": V, "C": C, "E": E}
    return blocks, (T, S, 0 if sink_k is None else sink_k.shape[1], window_size), sizes


def at_once(block: Block, R: int, window_size: int, sinks: int) -> int:
    """How many blocks hold all sinks and keys that a block of rows may see. 0 if they are more than `block.at_once`, or
    if the sinks do not fit into the first block."""
    queries = (R - math.gcd(R, block.rows) + block.rows - 1) // R + 1
    blocks = cdiv(sinks + window_size + queries - 1, block.keys)
    return blocks if blocks <= block.at_once and sinks <= block.keys else 0


def _launch(block: Block) -> dict[str, int]:
    return {"N": block.rows, "K": block.keys, "num_warps": block.warps, "num_stages": 1}


def _launch_rows(block: Block, R: int, window_size: int, sinks: int) -> dict[str, int]:
    """Launch options of a kernel in which a program handles a block of rows."""
    blocks = at_once(block, R, window_size, sinks)
    keys = block.keys if blocks else block.looped or block.keys
    held = {"BLOCKS": blocks, "SINKS": next_power_of_2(max(sinks, 1)) if blocks else SINKS}
    return _launch(block) | {"K": keys} | held


_forward = torch.library.custom_op("gated_kernels::swa", forward, mutates_args=())
_backward = torch.library.custom_op("gated_kernels::swa_backward", backward, mutates_args=())


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, valid: Any, segment: Any, sink_k: Any, sink_v: Any, *rest: Any) -> list[Tensor]:
    given = q, k, v, sink_k, sink_v, *rest[1:5]
    return [x.new_empty(x.shape) for x in given if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window_size, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, lse = ctx.saved_tensors
    grads = iter(_backward(*tensors, ctx.window_size, ctx.scale, lse, do, dlse))
    with_gradients = 0, 1, 2, 5, 6, 8, 9, 10, 11
    return *(next(grads) if i in with_gradients and x is not None else None for i, x in enumerate(tensors)), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def triton_swa(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    *,
    window_size: int,
    scale: float,
    valid_BS: Tensor | None = None,
    segment_ids_BS: Tensor | None = None,
    sink_k_BMGD: Tensor | None = None,
    sink_v_BMGV: Tensor | None = None,
    sink_visible_BTM: Tensor | None = None,
    memory_BTHV: Tensor | None = None,
    normalizer_BTH: Tensor | None = None,
    memory_logit_BTH: Tensor | None = None,
    mix_weight_H: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """What `gated_kernels.chunk_swa` returns for the same arguments. None on a CPU, and for what the kernels do not
    support, with a warning the first time."""
    if not (q_BTHD.is_cuda or INTERPRETED.value):
        return None
    valid_BS, sink_visible_BTM = (None if x is None else x.bool() for x in (valid_BS, sink_visible_BTM))
    tensors = (q_BTHD, k_BSGD, v_BSGV, valid_BS, segment_ids_BS, sink_k_BMGD, sink_v_BMGV, sink_visible_BTM)
    contribution = (
        memory_BTHV,
        *(None if x is None else x.float() for x in (normalizer_BTH, memory_logit_BTH, mix_weight_H)),
    )
    why = _unsupported(*tensors, *contribution)
    if why is None:
        run: Any = forward if launches_at_once(q_BTHD) else _forward
        return run(*tensors, *contribution, window_size, scale)
    if not torch.compiler.is_compiling():
        _warn(why)
    return None


def _unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    segment: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    visible: Tensor | None,
    memory: Tensor | None,
    normalizer: Tensor | None,
    memory_logit: Tensor | None,
    mix_weight: Tensor | None,
) -> str | None:
    (B, T, H, D), (S, G), V = q.shape, k.shape[1:3], v.shape[3]
    M = 0 if sink_k is None else sink_k.shape[1]
    for x, like in ((q, q), (v, v), (k, q), (sink_k, q), (sink_v, v), (memory, memory)):
        if (
            x is not None
            and like is not None
            and (x.dtype != like.dtype or x.dtype not in (torch.float32, torch.bfloat16, torch.float16))
        ):
            return f"{x.dtype} beside {like.dtype}" if x.dtype != like.dtype else f"{x.dtype}"
    if _size(q, v) not in BLOCKS:
        return f"heads of {D} and {V} channels in {q.dtype}"
    tensors = k, v, valid, segment, sink_k, sink_v, visible, memory, normalizer, memory_logit, mix_weight
    shapes = ((B, S, G, D), (B, S, G, V), (B, S), (B, S), (B, M, G, D), (B, M, G, V), (B, T, M))
    for x, shape in zip(tensors, (*shapes, (B, T, H, V), (B, T, H), (B, T, H), (H,))):
        if x is not None and (x.shape != shape or x.device != q.device):  # a kernel would read out of bounds
            return f"tensor of shape {tuple(x.shape)} on {x.device} for one of {shape} on {q.device}"
    return None


@cache
def _warn(why: str) -> None:
    warnings.warn(f"gated_kernels: the Triton window does not support {why}; the torch op runs instead", stacklevel=4)
