"""Window attention: its inputs, the memory's contribution, and the call to the kernel.

Shapes: B batch, T tokens, S = tokens in the ring + T, M sinks, H query heads, G key-value heads, D head size, V value
size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from gated_kernels.swa.chunk import chunk_swa
from torch import Tensor

if TYPE_CHECKING:
    from liger_convert.model.sequence import WindowMetadata

SUM_PIECE = 128  # tokens that are summed at once, see `running_sums`


class WindowInputs(NamedTuple):
    """Rotated queries and keys, values, and the sinks' keys and values (None: no sinks).

    window: how many tokens a query sees, its own included; 0 means all.
    scale: the factor on the logits.
    softcap: the bound of the logits, if there is one.
    """

    q_BTHD: Tensor
    k_BSGD: Tensor
    v_BSGV: Tensor
    sink_k_BMGD: Tensor | None
    sink_v_BMGV: Tensor | None
    metadata: WindowMetadata
    window: int
    scale: float
    softcap: float | None = None


class MemoryContribution(NamedTuple):
    """What the window's kernel needs to combine the memory's output with its own.

    normalizer_BTH: None if the memory's output is already divided by it.
    memory_logit_BTH, mix_weight_H: the memory's logit in a shared denominator, or its weight in a mix of both outputs;
        the other one is None.
    """

    memory_BTHV: Tensor
    normalizer_BTH: Tensor | None
    memory_logit_BTH: Tensor | None
    mix_weight_H: Tensor | None


def window_attention(
    inputs: WindowInputs, log_forget_BSG: Tensor | None, contribution: MemoryContribution | None
) -> tuple[Tensor, Tensor]:
    """The window's output [B,T,H,V], combined with the memory's contribution if given, and its log-sum-exp [B,T,H].

    log_forget_BSG: float32 log forget gates of the ring's and the new tokens; None without forget gates.
    """
    q_BTHD, k_BSGD, sink_k_BMGD, bias_channels = inputs.q_BTHD, inputs.k_BSGD, inputs.sink_k_BMGD, 0
    if log_forget_BSG is not None:
        bias_channels = 2
        q_BTHD, k_BSGD, sink_k_BMGD = with_forgetting(q_BTHD, k_BSGD, sink_k_BMGD, log_forget_BSG / inputs.scale)
    sinks = inputs.metadata.sinks
    memory = contribution or MemoryContribution(None, None, None, None)  # type: ignore[arg-type]
    return chunk_swa(
        q_BTHD,
        k_BSGD,
        inputs.v_BSGV,
        window_size=inputs.window or k_BSGD.shape[1],
        scale=inputs.scale,
        valid_BS=inputs.metadata.valid_BS,
        segment_ids_BS=inputs.metadata.segment_ids_BS,
        sink_k_BMGD=sink_k_BMGD,
        sink_v_BMGV=inputs.sink_v_BMGV,
        sink_visible_BTM=None if sinks is None else sinks.visible_BTM,
        memory_BTHV=memory.memory_BTHV,
        normalizer_BTH=memory.normalizer_BTH,
        memory_logit_BTH=memory.memory_logit_BTH,
        mix_weight_H=memory.mix_weight_H,
        softcap=inputs.softcap,
        bias_channels=bias_channels,
    )


def with_forgetting(
    q_BTHD: Tensor, k_BSGD: Tensor, sink_k_BMGD: Tensor | None, log_f_BSG: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k and the sinks' k with two more channels, which add the sum of log_f from key s (exclusive) to query t.

    With c the running sum of log_f from the ring's first token on, q becomes [q, c_t, 1] and k becomes [k, 1, -c_s], so
    that their product grows by c_t - c_s. This is in at least float32, where a c of 1,000 is exact to 1e-4. The sinks
    become [k, 0, 0], which adds nothing.
    """
    T, R = q_BTHD.shape[1], q_BTHD.shape[2] // k_BSGD.shape[2]
    c_BSG1 = running_sums(log_f_BSG)[..., None]
    c_BTH1 = c_BSG1[:, -T:].repeat_interleave(R, 2)
    q = torch.cat((q_BTHD.to(log_f_BSG.dtype), c_BTH1, torch.ones_like(c_BTH1)), -1)
    k = torch.cat((k_BSGD.to(log_f_BSG.dtype), torch.ones_like(c_BSG1), -c_BSG1), -1)
    return q, k, None if sink_k_BMGD is None else F.pad(sink_k_BMGD.to(log_f_BSG.dtype), (0, 2))


def running_sums(x_BSG: Tensor) -> Tensor:
    """The sum over all tokens up to each one, in pieces of SUM_PIECE tokens.

    Compiled for a GPU, torch 2.11 fails on a sum over more tokens if a bias was added before it, see
    pytorch/pytorch#180221. P: tokens of a piece, N: pieces.
    """
    tokens = x_BSG.shape[1]
    padded_BSG = F.pad(x_BSG, (0, 0, 0, -tokens % SUM_PIECE))
    within_BNPG: Tensor = padded_BSG.unflatten(1, (-1, SUM_PIECE)).cumsum(2)
    before_BNG = F.pad(within_BNPG[:, :-1, -1].cumsum(1), (0, 0, 1, 0))
    return (within_BNPG + before_BNG[:, :, None]).flatten(1, 2)[:, :tokens]
