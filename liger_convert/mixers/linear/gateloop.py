"""GateLoop: linear attention with a complex, data-dependent gate per channel (2311.01927).

S_t = diag(a_t e^(i theta_t)) S_{t-1} + conj(k_t)^T v_t,   o_t = norm(Re(q_t S_t))
a_t = sigmoid(pool(k_t) + b),   theta_t = k_t P

Channels 2c and 2c + 1 of q and k are the real and imaginary parts of channel c. Let Theta_t be the sum of the angles up
to token t. Then this is the real recurrence with rotated keys and queries: Re(q_t conj(k_s) e^(i (Theta_t - Theta_s)))
is the product of q_t rotated by Theta_t and k_s rotated by Theta_s. After the last token, the state is rotated back to
S itself (its conjugate), so that no angle has to be stored.

P starts at 0, where every gate is real. Its learning rate is a thousandth of the others', because the angles of all
tokens add up: at the full rate, alignment ends with a larger loss than a window without a memory has (see eval/LOG.md).
`rope: true` adds the base's constant angles. With `phase: false`, gates are real, one per real channel.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, F feature size, C = F / 2, V value size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims, MixerSpec
from liger_convert.mixers.gates import log_sigmoid_gate
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class GateLoopSpec(GatedSpec):
    """Options of the gate.

    phase: whether gates are complex. Their angles are a learned linear function of the key and start at 0. With false,
        gates are real, one for each real channel.
    gate_bias: where the learned bias b of the gates' magnitudes starts. A larger value makes the memory last longer;
        7 makes it last about 1,100 tokens.
    """

    gate: Literal["pooled", "head", "learned", "constant"] = "pooled"
    phase: bool = True

    def problem(self) -> str | None:
        if self.phase and self.normalize:
            return "normalize: true is not possible here, where weights can be negative; use phase: false"
        if self.phase and (self.feature_map == "products" or (self.feature_map == "codebook" and self.codes % 2)):
            return "phase: true needs features in pairs, to be complex; use phase: false, or another feature_map"
        return super().problem()


@register_mixer("gateloop")
class GateLoop(GatedMixer):
    summary = "linear attention with a complex gate per channel; each token sets its magnitude and angle"
    gate_rule = "sigmoid(pool(k) + bias) e^(i k P)"
    slow_parameters: ClassVar[dict[str, float]] = {"phase_GDC": 1e-3}
    left_out = "the projection from the layer's input to the gate's angle; off by default: `gate_proj`, `output_gate`"
    Spec = GateLoopSpec
    spec: GateLoopSpec

    def __init__(self, spec: GateLoopSpec, dims: HeadDims):
        super().__init__(spec, dims)
        if spec.phase:
            self.phase_GDC = nn.Parameter(torch.empty(dims.kv_heads, dims.dim, self.features // 2))

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        assert isinstance(spec, GateLoopSpec)
        sizes = super().gate_sizes(spec, dims)
        return {name: max(size // 2, 1) for name, size in sizes.items()} if spec.phase else sizes

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.spec.phase:
            init.zeros_(self.phase_GDC)

    def decay(self, logits: Tensor) -> Tensor:
        log_a = log_sigmoid_gate(logits, 1.0)
        return log_a.repeat_interleave(2, -1) if self.spec.phase and log_a.shape[-1] > 1 else log_a

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        entries = super().write(inputs, v_BTGV)
        if not self.spec.phase:
            return entries
        with torch.autocast(v_BTGV.device.type, enabled=False):  # rounding errors of angles would add up
            theta_BTGC = torch.einsum("btgd,gdc->btgc", self.gate_key(inputs).float(), self.phase_GDC.float())
        return *entries, theta_BTGC

    def attend(
        self, q_BTHF: Tensor, entries: tuple[Tensor, ...], **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if not self.spec.phase:
            return super().attend(q_BTHF, entries, **options)
        k_BTGF, v_BTGV, log_a, theta_BTGC = entries
        k_angle_BTGC = theta_BTGC.double().cumsum(1)  # float32 is too coarse for large angles
        q_angle_BTGC = k_angle_BTGC - theta_BTGC if options["exclusive"] else k_angle_BTGC
        q_BTHF = turn(q_BTHF, q_angle_BTGC.repeat_interleave(q_BTHF.shape[2] // k_BTGF.shape[2], 2))
        o_BTHV, _, state_BGFV = super().attend(q_BTHF, (turn(k_BTGF, k_angle_BTGC), v_BTGV, log_a), **options)
        return o_BTHV, None, turn(state_BGFV.mT, -k_angle_BTGC[:, -1, :, None]).mT


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """x [..., F], with pairs of channels taken as complex numbers, times e^(i angle) [..., F / 2]; in float32."""
    re, im = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    angle = angle.remainder(2 * math.pi).float()
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((re * cos - im * sin, re * sin + im * cos), -1).flatten(-2)
