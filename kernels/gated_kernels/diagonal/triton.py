"""The diagonal recurrence in Triton kernels.

The state before every chunk is made first, then all chunks' outputs at once. Within a chunk, the score of tokens t and
s is q_t k_s times every decay after s up to t. It is taken at the one level at which t and s lie in the second and the
first half of the same block: there both decays end at the boundary between the halves, so that each is the exponential
of a sum of gates, at most 1 at any strength. A level is one matrix product of the whole chunk, masked.

Matrix products take the inputs' dtype and accumulate in fp32: bf16 as it is, fp32 as three TF32 products, and fp16 as
one TF32 product, which holds it exactly and does not overflow. The backward pass computes all of it again; only the
inputs are kept. A state belongs to a key-value head and is never repeated.

All of this is for a gate per feature in fp32 and fp16 (`features.py`). In bf16 most chunks need no levels
(`features_bf16.py`), and with one gate a head, or none, no chunk does (`scalar.py`): these have kernels of their own.
Only the last know a mass; for the others it is a column of ones beside the values. Only those for bf16 take queries
with a log-sum-exp as they are; for the others exp(q - lse) is made first, once in each pass, in the inputs' dtype.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Kernels see BF of the features and BV of the values at a time.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from gated_kernels.diagonal import features_bf16, scalar
from gated_kernels.diagonal.features import dqk_kernel, dstates_kernel, dv_kernel, outputs_kernel, states_kernel
from gated_kernels.diagonal.tiles import PRODUCTS, contiguous
from gated_kernels.interpreter import INTERPRETED

CHUNK = 32


def constants(G: int, R: int, F: int, V: int, exclusive: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels are compiled for; fixed by the sizes and the dtype, never searched for."""
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
    }


def options(dtype: torch.dtype) -> dict[str, int]:
    return {"num_warps": 8 if PRODUCTS[dtype][0] == torch.float32 else 4}


def _block(size: int) -> int:
    """64, or 32 where that leaves less unused: for 65 and 80, say."""
    return 32 if 0 < size % 64 <= 32 else 64


class _Problem:
    """The sizes of one call, and what every kernel is given."""

    def __init__(self, q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, exclusive: bool):
        B, T, H, F = q_BTHF.shape
        G, V = v_BTGV.shape[2:]
        dtype = _promoted(q_BTHF, k_BTGF, v_BTGV)
        N = triton.cdiv(T, CHUNK)
        self.T = T
        self.states_BGNFV = v_BTGV.new_empty(B, G, N, F, V, dtype=PRODUCTS[dtype][0])
        blocks_of_F, blocks_of_V = triton.cdiv(F, _block(F)), triton.cdiv(V, _block(V))
        self.by_state, self.by_query = (B * G, blocks_of_F, blocks_of_V), (B * H * N,)
        self.by_feature, self.by_value = (B * G * N, blocks_of_F), (B * G * N, blocks_of_V)
        self.compiled_for = constants(G, H // G, F, V, exclusive, dtype) | options(dtype)


def _promoted(*tensors: Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors))


@torch.library.custom_op("gated_kernels::diagonal", mutates_args=())
def forward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    written: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the mass (empty without `written`) and the last state."""
    q, q_lse, k, v, log_a, written, state, segment = contiguous(q, q_lse, k, v, log_a, written, state, segment)
    dtype = _promoted(q, k, v)
    if q_lse is not None and not _reads_logits(dtype, log_a):
        q = _features(q, q_lse, dtype)
    if log_a is None or log_a.shape[-1] == 1:
        with torch.cuda.device_of(v):
            return scalar.forward(q, k, v, log_a, written, state, segment, exclusive)
    assert written is None
    none = v.new_empty(0, dtype=torch.float32)
    if dtype == torch.bfloat16:
        with torch.cuda.device_of(v):
            o, last = features_bf16.forward(q, q_lse, k, v, log_a, state, segment, exclusive)
        return o, none, last
    p = _Problem(q, k, v, exclusive)
    o, last = v.new_empty(*q.shape[:3], v.shape[-1]), torch.empty_like(state)
    with torch.cuda.device_of(v):
        states_kernel[p.by_state](k, v, log_a, segment, state, p.states_BGNFV, last, p.T, **p.compiled_for)
        outputs_kernel[p.by_query](q, k, v, log_a, segment, p.states_BGNFV, o, p.T, **p.compiled_for)
    return o, none, last


@forward.register_fake
def _(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    written: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    mass = v.new_empty(0 if written is None else q.shape[:3], dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[-1]), mass, state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::diagonal_backward", mutates_args=())
def backward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    written: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dmass: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, q_lse (empty where there is none), k, v, log_a (likewise) and the state."""
    q, q_lse, k, v, log_a, written, state, segment = contiguous(q, q_lse, k, v, log_a, written, state, segment)
    do, dmass, dlast = contiguous(do, dmass, dlast)
    dtype, of_q, phi, dlse = _promoted(q, k, v), q.dtype, None, None
    if q_lse is not None and not _reads_logits(dtype, log_a):
        q = phi = _features(q, q_lse, dtype)
    with torch.cuda.device_of(v):
        if log_a is None or log_a.shape[-1] == 1:
            dq, dk, dv, dlog_a, dstate, _ = scalar.backward(
                q, k, v, log_a, written, state, segment, exclusive, do, None if written is None else dmass, dlast
            )
        elif dtype == torch.bfloat16:
            dq, dlse, dk, dv, dlog_a, dstate = features_bf16.backward(
                q, q_lse, k, v, log_a, state, segment, exclusive, do, dlast
            )
        else:
            p = _Problem(q, k, v, exclusive)
            states, dstates, last = p.states_BGNFV, torch.empty_like(p.states_BGNFV), torch.empty_like(state)
            dq, dk, dv, dlog_a, dstate = (torch.empty_like(x) for x in (q, k, v, log_a, state))
            by_token = q, k, v, log_a, segment, do
            states_kernel[p.by_state](k, v, log_a, segment, state, states, last, p.T, **p.compiled_for)
            dstates_kernel[p.by_state](q, log_a, segment, do, dlast, dstates, dstate, p.T, **p.compiled_for)
            dv_kernel[p.by_value](q, k, log_a, segment, do, dstates, dv, p.T, **p.compiled_for)
            dqk_kernel[p.by_feature](*by_token, states, dstates, dq, dk, dlog_a, p.T, **p.compiled_for)
    if phi is not None:
        dlogits = dq.float() * phi
        dq, dlse = dlogits.to(of_q), -dlogits.sum(-1)
    none = v.new_empty(0, dtype=torch.float32)
    return dq, none if dlse is None else dlse, dk, dv, v.new_empty(0) if dlog_a is None else dlog_a, dstate


def _reads_logits(dtype: torch.dtype, log_a: Tensor | None) -> bool:
    """Whether the kernels make exp(q - lse) themselves."""
    return dtype == torch.bfloat16 and log_a is not None and log_a.shape[-1] > 1


def _features(q: Tensor, q_lse: Tensor, dtype: torch.dtype) -> Tensor:
    return (q - q_lse[..., None]).exp().to(dtype)


@backward.register_fake
def _(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    written: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dmass: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, state))
    dlse = v.new_empty(0 if q_lse is None else q_lse.shape, dtype=torch.float32)
    return dq, dlse, dk, dv, v.new_empty(0) if log_a is None else log_a.new_empty(log_a.shape), dstate


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dmass: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    _, q_lse, _, _, log_a, *_ = ctx.saved_tensors
    dq, dlse, dk, dv, dlog_a, dstate = backward(*ctx.saved_tensors, ctx.exclusive, do, dmass, dlast)
    dlse, dlog_a = None if q_lse is None else dlse, None if log_a is None else dlog_a
    return dq, dlse, dk, dv, dlog_a, None, dstate, None, None


forward.register_autograd(_differentiate, setup_context=_keep)


def diagonal(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    *,
    written_BTG: Tensor | None = None,
    state_BGFV: Tensor | None = None,
    segment_BT: Tensor | None = None,
    exclusive: bool = False,
    q_lse_BTH: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """As `gated_kernels.diagonal`; None on a CPU, and with a warning once for what the kernels cannot do."""
    if not (v_BTGV.is_cuda or INTERPRETED.value):
        return None
    if why := problem(q_BTHF, k_BTGF, v_BTGV, log_a, written_BTG, state_BGFV, segment_BT, q_lse_BTH):
        if not torch.compiler.is_compiling():
            _warn_once(why)
        return None
    state = first_state(v_BTGV, k_BTGF.shape[-1], written_BTG, state_BGFV)
    q_lse = None if q_lse_BTH is None else q_lse_BTH.float()

    def run(v: Tensor, written: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return forward(q_BTHF, q_lse, k_BTGF, v, log_a, written, state, segment_BT, exclusive)

    return with_mass(run, v_BTGV, log_a, written_BTG)


def first_state(v: Tensor, features: int, written: Tensor | None, state: Tensor | None) -> Tensor:
    """The given state, or one of zeros, in fp32 [B, G, F, V], with a mass one column more."""
    if state is not None:
        return state.float()
    B, _, G, V = v.shape
    return v.new_zeros(B, G, features, V + (written is not None), dtype=torch.float32)


def with_mass(
    run: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]],
    v: Tensor,
    log_a: Tensor | None,
    written: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What `run(v, written)` gives; its kernels for gates per feature take the mass as one more column of values."""
    if written is None or log_a is None or log_a.shape[-1] == 1:
        o, mass, last = run(v, written)
        return o, None if written is None else mass, last
    o, _, last = run(torch.cat((v, written[..., None].to(v.dtype)), -1), None)
    return o[..., :-1], o[..., -1].float(), last


def problem(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    written_BTG: Tensor | None,
    state_BGFV: Tensor | None,
    segment_BT: Tensor | None,
    q_lse_BTH: Tensor | None = None,
) -> str | None:
    """What the kernels do not take of this, or None."""
    (B, T, H, F), (G, V) = q_BTHF.shape, v_BTGV.shape[2:]
    if (dtype := _promoted(q_BTHF, k_BTGF, v_BTGV)) not in PRODUCTS:
        return f"inputs in {str(dtype).removeprefix('torch.')}"
    gates = (B, T, G, F if log_a is None or log_a.shape[-1] > 1 else 1)
    states = (B, G, F, V + (written_BTG is not None))
    shapes = ((B, T, G, F), (B, T, G, V), gates, (B, T, G), states, (B, T), (B, T, H))
    given = k_BTGF, v_BTGV, log_a, written_BTG, state_BGFV, segment_BT, q_lse_BTH
    for x, shape in zip(given, shapes, strict=True):
        if x is not None and (x.shape != shape or x.device != q_BTHF.device):  # a kernel would read what is not there
            return f"{tuple(x.shape)} on {x.device} where {shape} on {q_BTHF.device} is due"
    return None


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(f"diagonal runs in torch, its Triton kernels do not take {why}", stacklevel=4)
