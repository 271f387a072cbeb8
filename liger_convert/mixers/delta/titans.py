"""Titans: a memory trained with momentum and forgetting (2501.00663, eq. 12 to 14), by default a matrix.

Z_t = eta_t Z_{t-1} - theta_t u_t^T (u_t M_{t-1} - v_t),   M_t = (1 - alpha_t) M_{t-1} + Z_t,   o_t = q_t M_t
theta_t = sigmoid(pool(k_t) + c),   eta_t = sigmoid(pool(k_t) + d),   1 - alpha_t = exp(-softplus(pool(k_t) + e))

with u = k / |k| and q of length 1. The momentum Z applies an update again at later tokens. The paper computes the three
rates with new projections; here they are computed from pooled keys, to which `gate_proj` adds projections. The
recurrent state is two matrices of D x D per head.

`model: mlp` is the paper's deep memory with two layers. `mini_batch` is its chunk size: all gradients of a chunk are
taken at the memory from the start of the chunk (section 3.2). Both begin with a learned M_0, as in inner_model.py.
Persistent tokens write the same into the memory for every text, so M_0 replaces them there.

`persistent: N` has attention see them (section 3.3, eq. 19): N pairs of a key and a value that are learned and take
part in the softmax of every query beside the window,

y_t = (sum_s e^(l_ts) v_s + sum_n w_n e^(l_tn) v_n) / (sum_s e^(l_ts) + sum_n |w_n| e^(l_tn)),   l_tn = q_t k_n scale.

With w_n = 1 this is the paper's softmax. Here w_n is learned per query head and starts at 0, where y_t is the window's
output. A pair has no position, so its q_t is the query before rotary. The paper projects N learned inputs to keys and
values; here the keys and values are learned themselves.

The paper combines memory and attention in three ways:

- Memory as a gate (eq. 26 to 28) is `combine: gate`: y_t * 2 sigmoid(g norm(o_t)). g is learned per channel and starts
  at 0, where the factor is 1. The paper normalizes y_t, too, which no scale makes the identity.
- Memory as context (eq. 21 to 25) is `combine: context`: what a query reads is one more pair of its softmax, with the
  value o_t and a learned key per head. Its w starts at 0 as well. In the paper, a query also sees what other queries of
  its segment have read, the output of attention is what is written, and it is gated by another read.
- Memory as a layer (eq. 29 to 31) projects the memory's output again for attention. A layer of a checkpoint has one set
  of projections. Layers with `combine: memory` and softmax layers in turn are such a stack.

With the first two, the model starts as its window alone.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, D head size, V value size, N pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from gated_kernels.momentum.chunk import chunk_momentum
from gated_kernels.swa.chunk import combine
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, Branches, HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.delta.base import DeltaMixer, unit
from liger_convert.mixers.delta.inner_model import InnerModel, InnerModelSpec, state_shape
from liger_convert.mixers.read_pieces import normed
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.window_attention import WindowInputs, window_attention

if TYPE_CHECKING:
    from liger_convert.model.cache import LinearizedCacheLayer
    from liger_convert.model.sequence import SequenceMetadata

MOST_ABOVE = 80.0  # of a pair's logit above the window's log-sum-exp, so that its exponential stays within float32


@dataclass(frozen=True)
class TitansSpec(InnerModelSpec):
    """Options of momentum and decay, which have one value each per key-value head, and of the paper's layer.

    combine: as in MixerSpec, or two forms of the paper. With `gate`, the memory's output multiplies the window's. With
        `context`, it is one more value that attention sees. Both start as the window alone.
    momentum_bias: where the learned bias d of the momentum starts. With a larger value, the momentum lasts longer; with
        0, it halves at every token.
    gate_bias: where the learned bias e of the decay starts. A larger value forgets faster; with -7 the memory lasts
        about 1,100 tokens.
    persistent: N, how many learned key-value pairs every query sees beside the window; 0 for none. They start without
        weight.
    """

    momentum_bias: float = 0.0
    gate_bias: float = -7.0
    persistent: int = 0

    @property
    def pairs(self) -> int:
        return self.persistent

    @property
    def combines_itself(self) -> bool:
        return True

    def problem(self) -> str | None:
        if self.persistent < 0:
            return f"persistent: {self.persistent} is negative; use 0 for none"
        return super().problem()


@register_mixer("titans")
class Titans(DeltaMixer):
    summary = "delta rule with momentum and a decay per head"
    gate_rule = "exp(-softplus(pool(k) + bias))"
    left_out = (
        "memory as layer (it needs a second set of projections; layers with `combine: memory` and softmax layers in "
        "turn are such a stack), writing the output of attention; off by default: `persistent`, `combine: gate` "
        "(memory as gate), `combine: context` (memory as context; a query sees only its own read), `model: mlp`, "
        "`mini_batch: 16`, `gate_proj`, `short_conv` with `conv_activation: silu`, `output_norm`, `output_gate`"
    )
    recurrence = "momentum"
    Spec = TitansSpec
    spec: TitansSpec

    def __init__(self, spec: TitansSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.model = None if spec.is_recurrent else InnerModel(spec, dims)
        self.momentum_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))
        self.gate_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))
        self.persistent = PersistentPairs(spec.persistent, dims) if spec.persistent else None
        if spec.combine == "gate":
            self.gate_size_HV = nn.Parameter(torch.empty(dims.heads, dims.dim))
        elif spec.combine == "context":
            self.context_key_H1D = nn.Parameter(torch.empty(dims.heads, 1, dims.dim))
            self.context_weight_H1 = nn.Parameter(torch.empty(dims.heads, 1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.momentum_bias_G1, self.spec.momentum_bias)
        init.constant_(self.gate_bias_G1, self.spec.gate_bias)
        for piece in (self.model, self.persistent):
            if piece is not None:
                piece.reset_parameters()
        if self.spec.combine == "gate":
            init.zeros_(self.gate_size_HV)
        elif self.spec.combine == "context":
            init.zeros_(self.context_key_H1D)
            init.zeros_(self.context_weight_H1)

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, TitansSpec)
        if spec.is_recurrent:
            return {"state": (dims.kv_heads, 2 * dims.dim, dims.dim)}
        return {"state": state_shape(spec, dims, rows=3)}

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        return super().gate_sizes(spec, dims) | {"gate": 1, "momentum": 1}

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return -F.softplus(self.gate_logits(inputs, "gate", self.gate_bias_G1))

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        log_eta = F.logsigmoid(self.gate_logits(inputs, "momentum", self.momentum_bias_G1))
        if self.model is not None:
            theta_BTG1 = self.beta(inputs) * self.spec.step_scale(self.dims)
            gates = self.log_gate(inputs), log_eta
            return unit(inputs[-1]), v_BTGV.float(), theta_BTG1, *gates, torch.ones_like(log_eta, dtype=torch.bool)
        # the last entry lets the momentum act: it, too, must be 0 for a token that is not written
        return *super().write(inputs, v_BTGV), log_eta, torch.ones_like(log_eta)

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        if self.model is not None:
            o_BTHV, state = self.model(self.query(qkv), entries, states.get("state"), segment_ids_BT, exclusive)
        else:
            o_BTHV, state = chunk_momentum(
                self.query(qkv),
                *entries,
                initial_state=states.get("state"),
                segment_ids_BT=segment_ids_BT,
                exclusive=exclusive,
            )
        return MemoryOutput(o_BTHV.to(qkv.v_BSGD.dtype), None), {"state": state}

    def prefill(
        self,
        qkv: QKV,
        window_inputs: WindowInputs,
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None,
        branches: Branches,
    ) -> Tensor:
        if self.persistent is None and self.spec.combine not in ("gate", "context"):
            return super().prefill(qkv, window_inputs, metadata, past, branches)
        memory_BTHV = self.remember(qkv, metadata, past).o_BTHV
        o_BTHV, lse_BTH = window_attention(window_inputs, self.log_forget(qkv, metadata, past), None)
        if self.persistent is not None:
            o_BTHV, lse_BTH = self.persistent(qkv.q_BTHD, window_inputs, o_BTHV, lse_BTH)
        if branches != "both":
            return self.ablate(o_BTHV, memory_BTHV, branches)
        if self.spec.combine == "gate":
            gate_BTHV = 2 * normed(memory_BTHV.float(), self.gate_size_HV).sigmoid()
            return (gate_BTHV * o_BTHV.float()).to(o_BTHV.dtype)
        if self.spec.combine == "context":
            logits_BTH1 = pair_logits(qkv.q_BTHD, self.context_key_H1D, window_inputs)
            share_BTH1, _ = pair_shares(logits_BTH1, self.context_weight_H1, lse_BTH)
            return with_pairs(o_BTHV, share_BTH1, share_BTH1 * memory_BTHV.float())
        return combine(o_BTHV, lse_BTH, memory_BTHV, None, None, self.mix_weight(o_BTHV.device))[0]

    def ablate(self, window_o_BTHV: Tensor, memory_BTHV: Tensor, branches: Branches) -> Tensor:
        """As in Mixer. A gate alone opens nothing, and a memory as context alone is all that attention sees."""
        if self.spec.combine not in ("gate", "context"):
            return super().ablate(window_o_BTHV, memory_BTHV, branches)
        if branches == "window":
            return window_o_BTHV
        if self.spec.combine == "gate":
            return torch.zeros_like(window_o_BTHV)
        return (self.context_weight_H1.float().sign() * memory_BTHV.float()).to(window_o_BTHV.dtype)


class PersistentPairs(nn.Module):
    """N learned pairs of a key and a value per key-value head, with a weight per query head that starts at 0."""

    def __init__(self, pairs: int, dims: HeadDims):
        super().__init__()
        self.k_GND = nn.Parameter(torch.empty(dims.kv_heads, pairs, dims.dim))
        self.v_GNV = nn.Parameter(torch.empty(dims.kv_heads, pairs, dims.dim))
        self.weight_HN = nn.Parameter(torch.empty(dims.heads, pairs))

    def reset_parameters(self) -> None:
        # random, because equal pairs would stay equal; values other than 0, because the weights would not learn
        init.normal_(self.k_GND, std=self.k_GND.shape[-1] ** -0.5)
        init.normal_(self.v_GNV, std=self.v_GNV.shape[-1] ** -0.5)
        init.zeros_(self.weight_HN)

    def forward(
        self, q_BTHD: Tensor, window_inputs: WindowInputs, o_BTHV: Tensor, lse_BTH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds the pairs to the window's softmax.

        q_BTHD: queries before rotary. o_BTHV, lse_BTH: the window's output and its log-sum-exp, in float32.

        Returns both with the pairs, in their own dtypes.
        """
        logits_BTHN = pair_logits(q_BTHD, self.k_GND, window_inputs)
        share_BTHN, lse_BTH = pair_shares(logits_BTHN, self.weight_HN, lse_BTH)
        share_BTGRN = share_BTHN.unflatten(2, (len(self.v_GNV), -1))
        with torch.autocast(o_BTHV.device.type, enabled=False):
            read_BTGRV = torch.einsum("btgrn,gnv->btgrv", share_BTGRN, self.v_GNV.to(share_BTGRN.dtype))
        return with_pairs(o_BTHV, share_BTHN, read_BTGRV.flatten(2, 3)), lse_BTH


def pair_logits(q_BTHD: Tensor, k_GND: Tensor, window_inputs: WindowInputs) -> Tensor:
    """[B,T,H,N] the logits of pairs with these keys, scaled and capped as the window's, in float32."""
    with torch.autocast(q_BTHD.device.type, enabled=False):
        q_BTGRD = q_BTHD.float().unflatten(2, (len(k_GND), -1))
        logits = torch.einsum("btgrd,gnd->btgrn", q_BTGRD, k_GND.float()).flatten(2, 3) * window_inputs.scale
    if window_inputs.softcap is not None:
        logits = window_inputs.softcap * (logits / window_inputs.softcap).tanh()
    return logits


def pair_shares(logits_BTHN: Tensor, weight_HN: Tensor, lse_BTH: Tensor) -> tuple[Tensor, Tensor]:
    """The shares of pairs in a softmax that also has terms with this log-sum-exp, and the log-sum-exp of all.

    A share [B,T,H,N] has the sign of its weight. A query that sees nothing else sees no pair either.
    """
    alone_BTH = lse_BTH == -torch.inf
    above_BTHN = logits_BTHN - lse_BTH.masked_fill(alone_BTH, 0)[..., None]
    part_BTHN = weight_HN.float() * above_BTHN.clamp_max(MOST_ABOVE).exp()
    total_BTH = 1 + part_BTHN.abs().sum(-1)
    share_BTHN = (part_BTHN / total_BTH[..., None]).masked_fill(alone_BTH[..., None], 0)
    return share_BTHN, lse_BTH + total_BTH.log()


def with_pairs(o_BTHV: Tensor, share_BTHN: Tensor, read_BTHV: Tensor) -> Tensor:
    """The window's output with what is read from pairs, which have these shares. At shares of 0 it is unchanged."""
    o = o_BTHV.float()
    return (o + (read_BTHV - share_BTHN.abs().sum(-1, keepdim=True) * o)).to(o_BTHV.dtype)
