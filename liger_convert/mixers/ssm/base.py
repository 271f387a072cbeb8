"""Base of the mixers with a decay for every entry of the state. The read is a weighted mean of values per channel.

S_t = A_t * S_{t-1} + k_t^T [u_t * v_t, u_t],   [n_t, m_t] = q_t S_t,   o_t = n_t / m_t

Each value channel v has F decay rates of its own, so its sum n[v] also needs a normalizer m[v] of its own.
Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, F states per channel, V = D value channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gated_kernels.fused_step.arguments import MIN_NORMALIZER
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, Mixer, MixerSpec

SLOWEST, FASTEST = 1e-3, 1e-1  # initial decay per token of a channel's first state; channels spread over this range


@dataclass(frozen=True)
class ElementwiseSpec(MixerSpec):
    """Options of the elementwise mixers.

    states: F, the number of decay rates per value channel. The size of the state is proportional to it.
    skip: whether d * v of the query's own token is added to the read. d is learned per channel and starts at 0.
    """

    states: int = 16
    skip: bool = False

    def problem(self) -> str | None:
        if self.states < 1:
            return f"states: {self.states} is too small; use 1 or more"
        return super().problem()


class ElementwiseMixer(Mixer):
    """Subclasses define the step size of a token, and the k and q that write and read the state."""

    recurrence = "elementwise"
    spec: ElementwiseSpec

    def __init__(self, spec: ElementwiseSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.log_rate_GFV = nn.Parameter(torch.empty(dims.kv_heads, spec.states, dims.dim))
        if spec.skip:
            self.skip_HV = nn.Parameter(torch.empty(dims.heads, dims.dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.copy_(self.log_rate_GFV, self.first_log_rates().expand_as(self.log_rate_GFV))
        if self.spec.skip:
            init.zeros_(self.skip_HV)

    def first_log_rates(self) -> Tensor:
        """[F,1] or [F,V]: the real initialization of S4D (2206.11893), A = -(f + 1)."""
        return torch.arange(1.0, self.spec.states + 1, device=self.log_rate_GFV.device).log()[:, None]

    def first_log_steps(self) -> Tensor:
        """log dt [V], evenly spaced from the slowest channel to the fastest."""
        device = self.log_rate_GFV.device
        return torch.linspace(math.log(SLOWEST), math.log(FASTEST), self.dims.dim, device=device)

    def log_A(self) -> Tensor:
        """log A = -e^rate < 0, [G,F,V]. A clamp keeps it finite during training."""
        return -self.log_rate_GFV.float().clamp(max=15).exp()

    def with_skip(self, memory: MemoryOutput, qkv: QKV) -> MemoryOutput:
        """The read, plus d * v of the query's own token if the option `skip` is on."""
        if not self.spec.skip:
            return memory
        o_BTHV = memory.o_BTHV
        v_BTHV = qkv.v_BSGD[:, -o_BTHV.shape[1] :].repeat_interleave(self.dims.heads // self.dims.kv_heads, 2)
        return memory._replace(read_BTHV=(o_BTHV.float() + self.skip_HV.float() * v_BTHV.float()).to(o_BTHV.dtype))


def mean_per_channel(read_BTHV2: Tensor, dtype: torch.dtype) -> MemoryOutput:
    """n / m of the reads [n, m], and the log of m, averaged over channels. m has a lower bound, as in DiagonalMixer."""
    m_BTHV = read_BTHV2[..., 1].clamp_min(MIN_NORMALIZER)
    return MemoryOutput((read_BTHV2[..., 0] / m_BTHV).to(dtype), m_BTHV.mean(-1).log())
