"""The selective state space of Mamba (2312.00752), with input and output maps from the layer's keys and queries.

S_t = exp(dt_t log A) * S_{t-1} + phi(k_t)^T [dt_t * v_t, dt_t],   dt_t = softplus(pool(k_t) + b),   log A = -e^rate
o_t = n_t / m_t,   [n_t, m_t] = phi(q_t) S_t                            (base.py has the shapes and the starts)

k, q and v replace Mamba's B, C and x, as in 2408.15237. `short_conv: 4` is Mamba's convolution, applied before anything
is computed from k, q and v. `skip` is its skip, and `output_gate` the gate on its output. phi is a softmax over F
learned features, so the weights are positive and the read is a mean. The paper has neither phi nor the normalizer m.
Its SiLU after the convolution is `conv_activation: silu`, and its gate `output_gate_activation: silu`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gated_kernels.elementwise.chunk import chunk_elementwise
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.gates import pool_to
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.spec import ReadSpec
from liger_convert.mixers.ssm.base import ElementwiseMixer, ElementwiseSpec, mean_per_channel


@dataclass(frozen=True)
class MambaSpec(ElementwiseSpec, ReadSpec):
    """The options of all elementwise mixers, and those of a norm and a gate on the read."""


@register_mixer("mamba")
class Mamba(ElementwiseMixer):
    summary = "selective state space: each value channel decays at several rates, scaled by a step size from the token"
    gate_rule = "exp(-softplus(pool(k) + bias) e^rate)"
    left_out = (
        "the low-rank projection to the step size; a softmax over states and a normalizer are added; off by default: "
        "`short_conv` with `conv_bias` and `conv_activation: silu` (of queries and keys, too), `skip`, `output_gate` "
        "with `output_gate_activation: silu`"
    )
    Spec = MambaSpec
    # the product of two softmax features is about 1 / F, and steps add up to a fraction of 1: about e^-4 in all
    initial_log_share = 1.0
    spec: MambaSpec

    def __init__(self, spec: MambaSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.q_map_HDF = nn.Parameter(torch.empty(dims.heads, dims.dim, spec.states))
        self.k_map_GDF = nn.Parameter(torch.empty(dims.kv_heads, dims.dim, spec.states))
        self.step_bias_GV = nn.Parameter(torch.empty(dims.kv_heads, dims.dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.k_map_GDF, std=self.dims.dim**-0.5)
        # both maps start equal: a query reads the states to which similar keys were written
        init.copy_(self.q_map_HDF, self.k_map_GDF.repeat_interleave(self.dims.heads // self.dims.kv_heads, 0))
        bias_V = self.first_log_steps().exp().expm1().log()  # inverse of softplus
        init.copy_(self.step_bias_GV, bias_V.expand_as(self.step_bias_GV))

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, MambaSpec)
        return {"state": (dims.kv_heads, spec.states, 2 * dims.dim)}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return (dims.dim,)

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        return (qkv.k_BTGD,)

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        k_BTGD = inputs[-1].float()
        dt_BTGV = F.softplus(pool_to(k_BTGD, v_BTGV.shape[-1]) + self.step_bias_GV.float())
        k_BTGF = torch.einsum("btgd,gdf->btgf", k_BTGD, self.k_map_GDF.float()).float().softmax(-1)
        return k_BTGF, torch.cat((dt_BTGV * v_BTGV, dt_BTGV), -1), dt_BTGV

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        k_BTGF, v_BTGV, dt_BTGV = entries
        q_BTHF = torch.einsum("bthd,hdf->bthf", qkv.q_BTHD.float(), self.q_map_HDF.float()).float().softmax(-1)
        o_BTHV, state = chunk_elementwise(
            q_BTHF,
            k_BTGF,
            v_BTGV,
            torch.cat((dt_BTGV, dt_BTGV), -1),
            self.log_A().repeat(1, 1, 2),
            initial_state=states.get("state"),
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )
        return self.with_skip(mean_per_channel(o_BTHV.unflatten(-1, (2, -1)).mT, qkv.v_BSGD.dtype), qkv), {
            "state": state
        }
