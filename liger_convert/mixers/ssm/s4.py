"""The diagonal state space S4D (2206.11893) as a memory: running means of each value channel at F learned rates.

S_t[f, v] = A[f, v] S_{t-1}[f, v] + [v_t[v], 1],   log A = -e^rate
o_t[v] = n_t[v] / m_t[v],   [n_t[v], m_t[v]] = sum_f e^C[f, v] S_t[f, v]

A and C do not depend on the tokens. So a query can only decide how much weight this memory gets, not what it reads. The
rates are real and the weights e^C are positive, so the read is a mean. B is 1, since only its product with C matters.
For the op, every channel is a head of its own, with one value and its normalizer. Shapes: as in base.py; R = H / G,
N = G V heads of the op, L = H V query heads of the op.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gated_kernels.elementwise.chunk import chunk_elementwise
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.ssm.base import ElementwiseMixer, ElementwiseSpec, mean_per_channel


@dataclass(frozen=True)
class S4Spec(ElementwiseSpec):
    """The options of all elementwise mixers."""


@register_mixer("s4")
class S4(ElementwiseMixer):
    summary = "diagonal state space: running means of each value channel at learned rates, the same for every token"
    gate_rule = "exp(-e^rate)"
    left_out = (
        "complex rates, the GELU and the linear layer that mix the output's channels; a normalizer is added; off by "
        "default: `skip`"
    )
    Spec = S4Spec
    spec: S4Spec

    def __init__(self, spec: S4Spec, dims: HeadDims):
        super().__init__(spec, dims)
        self.read_GVRF = nn.Parameter(torch.empty(dims.kv_heads, dims.dim, dims.heads // dims.kv_heads, spec.states))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        # weights equal to the steps: the normalizer tends to about 1 + 1/2 + ... + 1/F, however slow the channel
        init.copy_(self.read_GVRF, self.first_log_steps()[:, None, None].expand_as(self.read_GVRF))

    def first_log_rates(self) -> Tensor:
        return super().first_log_rates() + self.first_log_steps()  # a fixed step size is part of the rate

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, S4Spec)
        return {"state": (dims.kv_heads, dims.dim, spec.states, 2)}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return ()

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        return ()

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        return v_BTGV, torch.ones_like(v_BTGV[..., :1])

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        v_BTGV, write_mask_BTG1 = (entry.float() for entry in entries)
        B, T, G, V = v_BTGV.shape
        write_mask_BTN1 = write_mask_BTG1.expand(-1, -1, -1, V).reshape(B, T, G * V, 1)
        read_LF = self.read_GVRF.float().clamp(max=15).exp().flatten(0, 2)
        o_BTL2, state = chunk_elementwise(
            read_LF[None, None],
            write_mask_BTN1.expand(-1, -1, -1, self.spec.states),
            torch.cat((v_BTGV.reshape(B, T, G * V, 1), write_mask_BTN1), -1),
            write_mask_BTN1.expand(-1, -1, -1, 2),
            self.log_A().mT.reshape(G * V, -1, 1).expand(-1, -1, 2),
            initial_state=states["state"].flatten(1, 2) if states else None,
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )
        o_BTHV2 = o_BTL2.unflatten(2, (G, V, -1)).transpose(3, 4).flatten(2, 3)
        return self.with_skip(mean_per_channel(o_BTHV2, qkv.v_BSGD.dtype), qkv), {"state": state.unflatten(1, (G, V))}
