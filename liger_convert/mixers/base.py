"""What every mixer is: a gate rule, a write rule and a read rule over one recurrence, joined with the window.

Shapes: B batch, T tokens, S = tokens of the ring before them + T, H query heads, G key-value heads, D head size,
F feature size, V value size. States are float32.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from gated_kernels.common.derivatives import logarithm, quotient
from gated_kernels.fused_step.chunk import EMPTY, MIN_NORMALIZER, StepConfig, StepInputs
from gated_kernels.gla.chunk import chunk_gla
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.calibration import Calibration

if TYPE_CHECKING:
    from liger_convert.model.cache import LinearizedCacheLayer
    from liger_convert.model.sequence import SequenceLayout

Combine = Literal["shared", "learned", "fixed", "memory"]
Scope = Literal["evicted", "all"]
Branches = Literal["both", "window", "memory"]

FADED = 0.02  # a new forget gate leaves the oldest token of its window e^-0.02 of its weight
FAR = 4096  # … and where the window is unbounded, the token this far back


@dataclass(frozen=True)
class HeadDims:
    """The sizes of one attention layer: hidden size, query heads, key-value heads, head size."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int


class Heads(NamedTuple):
    """One layer's projections: before (`q`, `k`) and after (`q_rot`, `k_rot`) rotary, for the new tokens.

    `v_BSGD` and `rank_BS` also hold the values and ranks (see SequenceLayout) still in the window ring, before the new
    ones; `x_BTC` are the layer's inputs.
    """

    q_BTHD: Tensor
    k_BTGD: Tensor
    q_rot_BTHD: Tensor
    k_rot_BTGD: Tensor
    v_BSGD: Tensor
    rank_BS: Tensor
    x_BTC: Tensor


class Memory(NamedTuple):
    """What a memory read gives: its output, and the log of the mass it stands for (None where it is not normalised).

    With `mass_BTH` the output is `read_BTHV` still to be divided by it, which the window does in passing.
    """

    read_BTHV: Tensor
    log_mass_BTH: Tensor | None
    mass_BTH: Tensor | None = None

    @property
    def o_BTHV(self) -> Tensor:
        return self.read_BTHV if self.mass_BTH is None else quotient(self.read_BTHV, self.mass_BTH)


class Beside(NamedTuple):
    """What stands beside a window: a memory's output (over its mass, where there is one), and its log weight in the one
    denominator or else its share."""

    memory_BTHV: Tensor
    mass_BTH: Tensor | None
    log_weight_BTH: Tensor | None
    share_H: Tensor | None


# The window's output [B,T,H,V], with what stands beside it or alone, and log-sum-exp [B,T,H], given the log forget
# gates [B,T,G] of the new tokens or None; called once a forward pass, as it moves the ring on.
WindowRead = Callable[[Tensor | None, Beside | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MixerSpec:
    """Options every mixer has.

    window: tokens a query sees exactly, itself included (at least 1; 0, for all tokens, where there is no memory).
    sinks: first tokens of a document that stay visible for ever. scope: the memory holds `all` tokens, or only
    those `evicted` from the window (sinks, which are never forgotten, are then never written). combine: one `shared`
    denominator over the window's logits and the memory's mass, a `learned` or `fixed` (half and half) mix of the
    two outputs, or the `memory` alone. In the shared denominator a memory of mass m weighs w = m^gamma e^(c q /
    sqrt(D) + beta) beside the sum of the window's e^s; every head learns its gamma, c and beta. forget: the
    window's weights fade by a learned gate of every token since (Forgetting Transformer, 2503.02130), one a
    key-value head; the sinks' beyond the window do not.
    """

    window: int = 64
    sinks: int = 4
    scope: Scope = "evicted"
    combine: Combine = "shared"
    forget: bool = False

    @property
    def is_calibrated(self) -> bool:
        """Whether `training.calibrate` fits the mixer: whether how it combines with the window can be fitted."""
        return self.combine in ("shared", "learned")

    @property
    def keep(self) -> int:
        """How many tokens the ring keeps between two calls: as many as there were where the window is unbounded."""
        return self.window - 1 if self.window else sys.maxsize

    def inner_types(self) -> tuple[str, ...]:
        """The names of other mixers that this one is made of."""
        return ()

    def problem(self) -> str | None:
        """What is wrong with these values, as `field: sentence`, or None."""
        if self.window < 1:
            return f"window: {self.window} is too small; a query sees at least itself, so 1 or more"
        if self.sinks < 0:
            return f"sinks: {self.sinks} is negative; use 0 for none"
        return None


class Mixer(nn.Module, ABC):
    """The memory branch of one layer and how it combines with the window; holds every new parameter of the layer.

    A mixer is called, never reached into, so that adapters and sharding that wrap it stay in effect.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    gate_rule: ClassVar[str]
    recurrence: ClassVar[str]
    Spec: ClassVar[type[MixerSpec]]
    initial_log_share: ClassVar[float] = -4.0
    # what a forward pass in training adds to the loss, already weighted, until `take_auxiliary_loss` takes it
    auxiliary_loss: Tensor | None = None

    def __init__(self, spec: MixerSpec, dims: HeadDims):
        super().__init__()
        self.spec, self.dims = spec, dims
        if spec.combine == "learned":
            self.mix_H = nn.Parameter(torch.empty(dims.heads))
        elif spec.combine == "shared":
            self.share_power_H = nn.Parameter(torch.empty(dims.heads))
            self.share_query_HD = nn.Parameter(torch.empty(dims.heads, dims.dim))
            self.log_share_H = nn.Parameter(torch.empty(dims.heads))
        if spec.forget:
            self.forget_GC = nn.Parameter(torch.empty(dims.kv_heads, dims.hidden))
            self.forget_bias_G = nn.Parameter(torch.empty(dims.kv_heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets every parameter to its start; the memory starts with little weight beside the window."""
        if self.spec.combine == "learned":
            init.constant_(self.mix_H, -3.0)
        elif self.spec.combine == "shared":
            init.ones_(self.share_power_H)
            init.zeros_(self.share_query_HD)
            init.constant_(self.log_share_H, self.initial_log_share)
        if self.spec.forget:
            init.zeros_(self.forget_GC)
            # log sigmoid(b) is nearly -e^-b
            init.constant_(self.forget_bias_G, math.log((self.spec.window or FAR) / FADED))

    def calibration(self) -> Calibration:
        """What `training.calibrate` fits of this mixer where `spec.is_calibrated`."""
        return Calibration()

    @classmethod
    @abstractmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        """Names and shapes, without the batch, of the float32 states of one layer and sequence."""

    @classmethod
    @abstractmethod
    def pending_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        """Sizes per token and key-value head of what `inputs` returns, which the ring keeps until eviction."""

    @abstractmethod
    def inputs(self, heads: Heads) -> tuple[Tensor, ...]:
        """What must be remembered of each new token until it is written, each [B,T,G,*]."""

    @abstractmethod
    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        """The recurrence's entries of each token, each [B,T,G,*]; an entry of zeros leaves the state untouched."""

    @abstractmethod
    def recur(
        self,
        heads: Heads,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        document_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[Memory, dict[str, Tensor]]:
        """Runs the recurrence over the tokens and reads it with the queries; returns the read and the new states."""

    def step_rules(self) -> StepConfig | None:
        """This mixer in the terms of the fused step of one token; None where it is beyond them."""
        return None

    def forward(
        self,
        heads: Heads | StepInputs,
        window: WindowRead | None,
        layout: SequenceLayout,
        past: LinearizedCacheLayer | None,
        branches: Branches,
        mix: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """The layer's output [B,T,H,V] from its heads and its window; moves `past` on.

        `mix` is given by a mixer made of this one, whose pass then runs in this call: where weights are offloaded, they
        are there only while the module that owns them is called.
        """
        return (mix or self.mix)(heads, window, layout, past, branches)

    def mix(
        self,
        heads: Heads | StepInputs,
        window: WindowRead | None,
        layout: SequenceLayout,
        past: LinearizedCacheLayer | None,
        branches: Branches,
    ) -> Tensor:
        """As `forward`. A token alone takes the fused step, which has its own window."""
        if isinstance(heads, StepInputs):
            assert past is not None
            return past.step(heads, self.step_rules())
        assert window is not None
        memory = self.remember(heads, layout, past)
        beside = self.beside(heads.q_BTHD, memory) if branches == "both" else None
        window_o_BTHV, _ = window(self.log_forget(heads), beside)
        return window_o_BTHV if branches == "both" else self.alone(window_o_BTHV, memory.o_BTHV, branches)

    def log_forget(self, heads: Heads) -> Tensor | None:
        """The log forget gates of the new tokens, float32 [B,T,G]; None where the window does not forget."""
        if not self.spec.forget:
            return None
        with torch.autocast(heads.x_BTC.device.type, enabled=False):
            logits_BTG = heads.x_BTC.float() @ self.forget_GC.float().mT
        return F.logsigmoid(logits_BTG + self.forget_bias_G.float())

    def remember(self, heads: Heads, layout: SequenceLayout, past: LinearizedCacheLayer | None) -> Memory:
        """Writes the tokens that are due, reads the memory with the queries, and moves `past` on."""
        inputs = self.inputs(heads)
        tokens = layout.tokens
        if self.spec.scope == "all":
            v_BTGV = heads.v_BSGD[:, -tokens:]
            writable_BT = layout.valid_BT
        else:
            keep = self.spec.keep
            streams = [layout.extend(past, f"pending{i}", t, keep) for i, t in enumerate(inputs)]
            inputs = tuple(_delay(stream, keep, tokens) for stream in streams)
            v_BTGV = _delay(heads.v_BSGD, keep, tokens)
            writable_BT = layout.written_on_eviction(heads.rank_BS, self.spec.window, self.spec.sinks)
        entries = self.write(inputs, v_BTGV)
        if writable_BT is not None:
            left_out_BT11 = ~writable_BT[:, :, None, None]
            entries = tuple(entry.masked_fill(left_out_BT11, 0) for entry in entries)
        states = {} if past is None else past.states
        memory, states = self.recur(heads, entries, states, layout.document_BT, exclusive=self.spec.scope == "evicted")
        if past is not None:
            for name, state in states.items():
                past.write(past.states, name, state)
        return memory

    def log_weight(self, q_BTHD: Tensor, memory: Memory) -> Tensor:
        """[B,T,H]: the log of the memory's weight beside the sum of the window's e^s (see MixerSpec)."""
        assert memory.log_mass_BTH is not None
        log_weight_BTH = LogWeight.apply(
            q_BTHD, memory.log_mass_BTH, self.share_query_HD, self.share_power_H, self.log_share_H
        )
        # whatever the query asks for, a memory that holds nothing weighs nothing
        return log_weight_BTH.masked_fill(memory.log_mass_BTH <= EMPTY, -1e4)

    def beside(self, q_BTHD: Tensor, memory: Memory) -> Beside | None:
        """The memory as the window takes it into its output; None where there is none."""
        if self.spec.combine == "shared":
            return Beside(memory.read_BTHV, memory.mass_BTH, self.log_weight(q_BTHD, memory), None)
        return Beside(memory.read_BTHV, memory.mass_BTH, None, self.share(q_BTHD.device))

    def share(self, device: torch.device) -> Tensor:
        """[H]: the memory's share of a mix that is learned or fixed."""
        if self.spec.combine == "learned":
            return self.mix_H.float().sigmoid()
        return torch.full((self.dims.heads,), 0.5 if self.spec.combine == "fixed" else 1.0, device=device)

    def alone(self, window_o_BTHV: Tensor, memory_BTHV: Tensor, branches: Branches) -> Tensor:
        """One branch without the other, which leaves a mix as it is, and a shared denominator at once."""
        one = window_o_BTHV if branches == "window" else memory_BTHV
        if self.spec.combine != "shared":
            share_H1 = self.share(one.device)[:, None]
            one = one.float() * (1 - share_H1 if branches == "window" else share_H1)
        return one.to(window_o_BTHV.dtype)


class LogWeight(torch.autograd.Function):
    """gamma log m + c q / sqrt(D) + beta (see MixerSpec), float32 [B,T,H], of q [B,T,H,D], log m [B,T,H], c [H,D], and
    gamma and beta [H].

    The gradients of the parameters are sums over all tokens, which are matrix products here: what torch.compile made of
    them for rows of any length took a third of a step of alignment on an H200. That of c takes queries in bf16 as they
    are: of a float32 copy, torch.compile would keep the largest tensor of a layer from the forward pass on.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BTHD: Tensor, log_mass_BTH: Tensor, query_HD: Tensor, power_H: Tensor, beta_H: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q_BTHD, log_mass_BTH, query_HD, power_H, beta_H)
        asked_BTH = (q_BTHD.float() * query_HD.float()).sum(-1) * q_BTHD.shape[-1] ** -0.5
        return power_H.float() * log_mass_BTH.float() + asked_BTH + beta_H.float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        q_BTHD, log_mass_BTH, query_HD, power_H, beta_H = ctx.saved_tensors
        (d_BTH,) = grads
        with torch.autocast(d_BTH.device.type, enabled=False):
            d_NH = d_BTH.flatten(0, 1)
            ones_1N = d_NH.new_ones(1, d_NH.shape[0])
            asked_BTH = d_BTH * q_BTHD.shape[-1] ** -0.5
            dtype = q_BTHD.dtype if multiplies_in_bf16(q_BTHD) else torch.float32
            q_HND = q_BTHD.to(dtype).flatten(0, 1).transpose(0, 1)
            return (
                (asked_BTH[..., None] * query_HD.float()).to(q_BTHD.dtype),
                (d_BTH * power_H.float()).to(log_mass_BTH.dtype),
                (asked_BTH.to(dtype).flatten(0, 1).T[:, None] @ q_HND)[:, 0].to(query_HD.dtype),
                (ones_1N @ (d_NH * log_mass_BTH.float().flatten(0, 1)))[0].to(power_H.dtype),
                (ones_1N @ d_NH)[0].to(beta_H.dtype),
            )


def _delay(stream_BSGX: Tensor, keep: int, tokens: int) -> Tensor:
    """[B,T,G,X]: at each new token, the one that leaves a ring of `keep` tokens behind it; zeros before the first."""
    missing = keep + tokens - stream_BSGX.shape[1]
    stream_BSGX = F.pad(stream_BSGX, (0, 0, 0, 0, missing, 0)) if missing else stream_BSGX
    return stream_BSGX[:, :tokens]


def multiplies_in_bf16(v_BSGD: Tensor) -> bool:
    """Whether a recurrence takes its factors in the bf16 of the layer's values, on a GPU: tensor cores multiply it at
    several times the speed of float32, and sum up in that; it has its range, too."""
    return v_BSGD.is_cuda and v_BSGD.dtype == torch.bfloat16


class DiagonalMixer(Mixer):
    """S_t = diag(a_t) S_{t-1} + phi(k_t)^T v_t, read by phi(q_t); subclasses say what phi and a are.

    With `normalize`, the state's last column is z_t = diag(a_t) z_{t-1} + phi(k_t), and the read is divided by
    phi(q_t) z_t: a weighted mean of values at any length, whose mass phi(q_t) z_t the shared denominator needs. The
    entries then end with a boolean, whether the token is written, by which its key is added to z.
    """

    recurrence = "gla"
    normalize: bool = True

    @abstractmethod
    def query_features(self, heads: Heads) -> Tensor:
        """phi(q) [B,T,H,F]."""

    @abstractmethod
    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """phi(k) [B,T,G,F]."""

    @abstractmethod
    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """log a <= 0, [B,T,G,F] or [B,T,G,1]."""

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        entries = self.key_features(inputs), v_BTGV, self.log_gate(inputs)
        if not self.normalize:
            return entries
        written_BTG1 = v_BTGV.new_ones(*v_BTGV.shape[:3], 1, dtype=torch.bool)
        return *entries, written_BTG1

    def recur(
        self,
        heads: Heads,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        document_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[Memory, dict[str, Tensor]]:
        o_BTHV, mass_BTH, state = self.attend(
            self.query_features(heads),
            entries,
            initial_state=states.get("state"),
            segment_ids_BT=document_BT,
            exclusive=exclusive,
        )
        memory = self.read(o_BTHV, mass_BTH)
        if memory.mass_BTH is None:  # else it may be too large for float16
            memory = memory._replace(read_BTHV=memory.read_BTHV.to(heads.v_BSGD.dtype))
        return memory, {"state": state}

    def attend(
        self, q_BTHF: Tensor, entries: tuple[Tensor, ...], **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The recurrence over what `write` gives: phi(q) S [B,T,H,V], its mass [B,T,H] with `normalize`, the state.

        `options` are those of `gated_kernels.chunk_gla`.
        """
        k_BTGF, v_BTGV, log_a, *written = entries
        if multiplies_in_bf16(v_BTGV):
            q_BTHF, k_BTGF = q_BTHF.to(v_BTGV.dtype), k_BTGF.to(v_BTGV.dtype)
        else:
            v_BTGV = v_BTGV.float()
        written_BTG = written[0][..., 0] if written else None
        return chunk_gla(q_BTHF, k_BTGF, v_BTGV, log_a, write_mask_BTG=written_BTG, **options)

    def read(self, o_BTHV: Tensor, mass_BTH: Tensor | None) -> Memory:
        """What the memory gives, of what `attend` does."""
        if mass_BTH is None:
            return Memory(o_BTHV, None)
        mass_BTH = mass_BTH.clamp_min(MIN_NORMALIZER)
        return Memory(o_BTHV, logarithm(mass_BTH), mass_BTH)
