"""The base class of mixers: a gate rule, a write rule and a read rule over one recurrence, combined with the window.

Shapes: B batch, T tokens, S = tokens in the ring before them + T, H query heads, G key-value heads, D head size,
F feature size, V value size. States are float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from gated_kernels.common.derivatives import logarithm, quotient
from gated_kernels.common.registry import kernel_for
from gated_kernels.fused_step.arguments import EMPTY, StepCache, StepConfig, StepInputs
from gated_kernels.fused_step.chunk import fused_step
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.calibration import Calibration
from liger_convert.mixers.gate_projection import GateProjection
from liger_convert.mixers.memory_logit import MemoryLogit
from liger_convert.mixers.projection_pieces import STATES as SHIFT_STATES
from liger_convert.mixers.projection_pieces import QueryKeyNorm, make_shift, shift_shapes
from liger_convert.mixers.read_pieces import ReadGate, ReadNorm
from liger_convert.mixers.short_convolution import STATES as CONVOLUTION_STATES
from liger_convert.mixers.short_convolution import RowPositions, ShortConvolutions, state_shapes
from liger_convert.mixers.spec import Combine as Combine
from liger_convert.mixers.spec import MixerSpec as MixerSpec
from liger_convert.mixers.spec import Scope as Scope
from liger_convert.mixers.window_attention import MemoryContribution, WindowInputs, window_attention

if TYPE_CHECKING:
    from liger_convert.model.cache import LinearizedCacheLayer
    from liger_convert.model.sequence import SequenceMetadata, WindowMetadata, WriteMask

Branches = Literal["both", "window", "memory"]
Method = Literal["prepare", "prefill", "decode_step"]

FADED = 0.02  # a freshly initialized forget gate decays the oldest token of its window to e^-0.02 of its weight
FAR = 4096  # the distance used instead of the window size if the window is unbounded


@dataclass(frozen=True)
class HeadDims:
    """The sizes of one attention layer: hidden size, query heads, key-value heads, head size."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int


class QKV(NamedTuple):
    """One layer's projections of the new tokens: before (`q`, `k`) and after (`q_rot`, `k_rot`) rotary.

    `v_BSGD` and `position_BS` (see SequenceMetadata) also cover the tokens in the window's ring, which come first.
    `x_BTC` are the layer's inputs.
    """

    q_BTHD: Tensor
    k_BTGD: Tensor
    q_rot_BTHD: Tensor
    k_rot_BTGD: Tensor
    v_BSGD: Tensor
    position_BS: Tensor
    x_BTC: Tensor


class MemoryOutput(NamedTuple):
    """The output of a memory read, and its normalizer or the log of it (None if it is not normalized).

    If `normalizer_BTH` is given, `read_BTHV` has not been divided by it yet; the window's kernel does that.
    """

    read_BTHV: Tensor
    log_BTH: Tensor | None
    normalizer_BTH: Tensor | None = None

    @property
    def log_normalizer_BTH(self) -> Tensor | None:
        return self.log_BTH if self.normalizer_BTH is None else logarithm(self.normalizer_BTH)

    @property
    def o_BTHV(self) -> Tensor:
        return self.read_BTHV if self.normalizer_BTH is None else quotient(self.read_BTHV, self.normalizer_BTH)


class Mixer(nn.Module, ABC):
    """The memory branch of one layer and its combination with the window; holds every new parameter of the layer.

    Other modules must call a mixer instead of using its parts, so that adapters and sharding that wrap it take effect.
    `left_out` lists the parts of the paper's layer that are missing and, after "off by default:", those that are
    options. It is "nothing" if none is missing, and empty if there is no paper. `slow_parameters`: learning rate
    multipliers by parameter name, relative to the mixers' learning rate.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    gate_rule: ClassVar[str]
    left_out: ClassVar[str] = ""
    slow_parameters: ClassVar[Mapping[str, float]] = {}
    recurrence: ClassVar[str]
    Spec: ClassVar[type[MixerSpec]]
    initial_log_share: ClassVar[float] = -4.0
    # whether scanning a row's shards in turn, each from the previous states, equals scanning the whole row
    passes_states: ClassVar[bool] = True
    # the weighted auxiliary loss of the last forward pass in training, until `take_auxiliary_loss` takes it
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
        if spec.forget and spec.forget_gate == "input":
            self.forget_GC = nn.Parameter(torch.empty(dims.kv_heads, dims.hidden))
        if spec.forget and spec.forget_gate != "fixed":
            self.forget_bias_G = nn.Parameter(torch.empty(dims.kv_heads))
        self.shift = make_shift(spec.shift, dims)
        self.qk_norm = QueryKeyNorm(dims) if spec.normalizes_qk else None
        self.gate_projection = GateProjection(self.gate_sizes(spec, dims), dims) if spec.projects_gates else None
        self.short_conv = ShortConvolutions(spec, dims) if spec.conv_taps else None
        has_norm, has_gate = spec.read_pieces
        self.read_norm = ReadNorm(dims) if has_norm else None
        self.read_gate = ReadGate(dims, spec.read_gate_function) if has_gate else None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which cannot hold a loss that still has its graph."""
        return self.__dict__ | {"auxiliary_loss": None}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes every parameter; the memory starts with little weight compared to the window."""
        if self.spec.combine == "learned":
            init.constant_(self.mix_H, -3.0)
        elif self.spec.combine == "shared":
            init.ones_(self.share_power_H)
            init.zeros_(self.share_query_HD)
            init.constant_(self.log_share_H, self.initial_log_share)
        if self.spec.forget and self.spec.forget_gate == "input":
            init.zeros_(self.forget_GC)
        if self.spec.forget and self.spec.forget_gate != "fixed":
            init.copy_(self.forget_bias_G, self.first_forget_bias(self.forget_bias_G.device))
        for piece in (self.shift, self.qk_norm, self.gate_projection, self.short_conv, self.read_norm, self.read_gate):
            if piece is not None:
                piece.reset_parameters()

    def first_forget_bias(self, device: torch.device) -> Tensor:
        """[G]: the initial logits b of the window's gates; for such b, log sigmoid(b) is close to -e^-b."""
        return torch.full((self.dims.kv_heads,), math.log((self.spec.window or FAR) / FADED), device=device)

    def calibration(self) -> Calibration:
        """The parameters of this mixer that `training.calibrate` fits if `spec.is_calibrated`."""
        return Calibration(read_size=None if self.read_norm is None else self.read_norm.size_HV)

    @classmethod
    @abstractmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        """Names and shapes, without the batch dimension, of the layer's float32 recurrent states."""

    @classmethod
    def cached_states(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        """As `state_shape`, plus the states of the short convolution and the token shift."""
        kept = state_shapes(spec.conv_taps, dims) | shift_shapes(spec.shift, dims)
        return {**cls.state_shape(spec, dims), **kept}

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        """The logits of each gate per key-value head, by the gate's name, which `gate_proj` adds a projection to."""
        return {}

    @classmethod
    def projected_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        """The last dimension of what `with_projected_gates` puts before the keys; empty without `gate_proj`."""
        return (sum(cls.gate_sizes(spec, dims).values()),) if spec.projects_gates else ()

    @classmethod
    @abstractmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        """The last dimensions of what `deferred_inputs` returns; the ring keeps these until eviction."""

    @abstractmethod
    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        """The tensors to keep for each new token until it is written to the memory, each [B,T,G,*]."""

    @abstractmethod
    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        """The recurrence's entries for each token, each [B,T,G,*]; all-zero entries leave the state unchanged.

        inputs: the deferred inputs; with a short convolution, the convolved last one is appended.
        """

    def with_projected_gates(self, keys: tuple[Tensor, ...], qkv: QKV) -> tuple[Tensor, ...]:
        """The keys to keep until they are written; before them, with `gate_proj`, the projection to the gates."""
        if self.gate_projection is None:
            return keys
        return self.gate_projection(qkv.x_BTC).to(keys[0].dtype), *keys

    def gate_key(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The first key of `with_projected_gates`, which gates are pooled from."""
        return inputs[0 if self.gate_projection is None else 1]

    def plus_projection(self, logits: Tensor, inputs: tuple[Tensor, ...], name: str) -> Tensor:
        """The logits of a gate [B,T,G,X], or [G,X] for all tokens; with `gate_proj`, plus the projection to it."""
        return logits if self.gate_projection is None else logits + self.gate_projection.of_gate(inputs[0], name)

    def write_masked(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor, mask: WriteMask) -> tuple[Tensor, ...]:
        """As `write`, with entries that leave the state unchanged for the tokens that the mask leaves out."""
        return tuple(entry.masked_fill(mask.left_out_BT11, 0) for entry in self.write(inputs, v_BTGV))

    @abstractmethod
    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        """Runs the recurrence over the tokens and reads it with the queries; returns the read and the new states.

        exclusive: whether a query reads the state before its own token's entry. It may only use the queries, keys and
        values of `qkv`: in a mixture of memories they belong to a subset of the tokens, which differs per head, and
        positions and layer inputs are empty.
        """

    def scan_reads(
        self, qkv: QKV, entries: tuple[Tensor, ...], segment_ids_BT: Tensor | None, exclusive: bool
    ) -> MemoryOutput:
        """The read of a `scan` without initial states, for callers that do not need the final states."""
        return self.scan(qkv, entries, {}, segment_ids_BT, exclusive)[0]

    def map_once(self, qkv: QKV, entries: tuple[Tensor, ...]) -> tuple[QKV, tuple[Tensor, ...]]:
        """Precomputes what every `scan` would recompute, for callers that scan the same tokens several times."""
        return qkv, entries

    def step_config(self) -> StepConfig | None:
        """The configuration of the fused decode step for this mixer; None if it is not supported."""
        return None

    def forward(self, method: Method, *inputs: Any, bound: Callable[..., Any] | None = None) -> Any:
        """The single entry point: calls `prepare`, `prefill` or `decode_step` with `inputs` and returns its result.

        bound: the same method of another mixer that contains this one, to call instead. Offloaded weights are only
        present while the module that owns them is being called.
        """
        return (getattr(self, method) if bound is None else bound)(*inputs)

    def prepare(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        x_BTC: Tensor,
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Applies the token shift and the query-key norm to q, k and v before rotary. Updates the states of `past`."""
        if self.shift is not None:
            row = RowPositions(metadata.valid_BT, None if metadata.segment_ids_BT is None else metadata.position_BT)
            states = {} if past is None else past.read_states(self)
            q_BTHD, k_BTGD, v_BTGD, after = self.shift(q_BTHD, k_BTGD, v_BTGD, x_BTC, row, states)
            if past is not None:
                q_BTHD = past.write_states(after, q_BTHD, self)
        if self.qk_norm is not None:
            q_BTHD, k_BTGD = self.qk_norm(q_BTHD, k_BTGD)
        return q_BTHD, k_BTGD, v_BTGD

    def prefill(
        self,
        qkv: QKV,
        window_inputs: WindowInputs,
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None,
        branches: Branches,
    ) -> Tensor:
        """The output [B,T,H,V] for any number of tokens, in training and inference.

        Updates the rings and states of `past`.
        """
        memory = self.remember(qkv, metadata, past)
        contribution = self.contribution(qkv.q_BTHD, memory) if branches == "both" else None
        window_o_BTHV, _ = window_attention(window_inputs, self.log_forget(qkv, metadata, past), contribution)
        return window_o_BTHV if branches == "both" else self.ablate(window_o_BTHV, memory.o_BTHV, branches)

    def decode_step(self, step_inputs: StepInputs, cache: StepCache) -> Tensor:
        """The output [B,1,H,D] for one token by the fused step, which updates `cache` in place."""
        config = self.step_config()
        assert config is not None
        return fused_step(step_inputs, cache, config)[:, None]

    def log_forget(self, qkv: QKV, metadata: SequenceMetadata, past: LinearizedCacheLayer | None) -> Tensor | None:
        """The log forget gates of the ring's and the new tokens, float32 [B,S,G]; None without forget gates."""
        if not self.spec.forget:
            return None
        if self.spec.forget_gate == "fixed":
            bias_G = self.first_forget_bias(qkv.x_BTC.device)
        else:
            bias_G = self.forget_bias_G.float()
        if self.spec.forget_gate == "input":
            with torch.autocast(qkv.x_BTC.device.type, enabled=False):
                bias_G = qkv.x_BTC.float() @ self.forget_GC.float().mT + bias_G
        log_f_BTG = F.logsigmoid(bias_G).expand(*qkv.x_BTC.shape[:2], -1)
        if metadata.valid_BT is not None:
            log_f_BTG = torch.where(metadata.valid_BT[..., None], log_f_BTG, 0)
        return extend(past, "log_f", log_f_BTG, window_metadata(self.spec, metadata, past))

    def remember(self, qkv: QKV, metadata: SequenceMetadata, past: LinearizedCacheLayer | None) -> MemoryOutput:
        """Writes the evicted (or all) tokens to the memory and reads it with the queries. Updates `past`."""
        inputs = self.deferred_inputs(qkv)
        tokens, evicted = metadata.tokens, self.spec.scope == "evicted"
        window = window_metadata(self.spec, metadata, past)
        if evicted:
            streams = [extend(past, f"deferred{i}", x, window) for i, x in enumerate(inputs)]
            inputs = tuple(_delay(stream, window.cache_window, tokens) for stream in streams)
            v_BTGV = _delay(qkv.v_BSGD, window.cache_window, tokens)
        else:
            v_BTGV = qkv.v_BSGD[:, -tokens:]
        states = {} if past is None else past.read_states(self)
        states = {name: state for name, state in states.items() if name not in SHIFT_STATES}
        after: dict[str, Tensor] = {}
        if self.short_conv is not None:
            packed, real_BT = metadata.segment_ids_BT is not None, metadata.valid_BT
            read = written = RowPositions(real_BT, metadata.position_BT if packed else None)
            if evicted:
                due_BT = metadata.position_on_eviction(window)
                written = RowPositions(None if window.valid_BS is None else due_BT >= 0, due_BT if packed else None)
            q_BTHD, k_BTGD, v_BTGV, after = self.short_conv(qkv.q_BTHD, inputs[-1], v_BTGV, read, written, states)
            inputs, qkv = (*inputs, k_BTGD), qkv._replace(q_BTHD=q_BTHD)
            qkv = qkv if evicted else qkv._replace(v_BSGD=v_BTGV)
            states = {name: state for name, state in states.items() if name not in CONVOLUTION_STATES}
        mask = metadata.write_mask_of_heads(self.dims.kv_heads, window if evicted else None)
        entries = self.write(inputs, v_BTGV) if mask is None else self.write_masked(inputs, v_BTGV, mask)
        if past is None:
            memory = self.scan_reads(qkv, entries, metadata.segment_ids_BT, exclusive=evicted)
        else:
            memory, states = self.scan(qkv, entries, states, metadata.segment_ids_BT, exclusive=evicted)
            read_BTHV = past.write_states({**states, **after}, memory.read_BTHV, self)
            memory = memory._replace(read_BTHV=read_BTHV)
        if self.read_norm is not None:
            memory = MemoryOutput(self.read_norm(memory.o_BTHV), memory.log_normalizer_BTH)
        memory = self.with_own_token(memory, qkv)
        if self.read_gate is not None:
            memory = memory._replace(read_BTHV=self.read_gate(memory.read_BTHV, qkv.x_BTC))
        return memory

    def with_own_token(self, memory: MemoryOutput, qkv: QKV) -> MemoryOutput:
        """The read plus the contribution of the query's own token, which comes after the norm and before the gate; none
        by default."""
        return memory

    def memory_logit(self, q_BTHD: Tensor, memory: MemoryOutput) -> Tensor:
        """[B,T,H]: the log of the memory's weight in the denominator shared with the window (see MixerSpec)."""
        parameters, kernel = (self.share_query_HD, self.share_power_H, self.log_share_H), kernel_for("memory_logit")
        if kernel is not None and memory.normalizer_BTH is not None:
            found: Tensor | None = kernel(q_BTHD, memory.normalizer_BTH, *parameters)
            if found is not None:
                return found
        log_normalizer_BTH = memory.log_normalizer_BTH
        assert log_normalizer_BTH is not None
        logit_BTH: Tensor = MemoryLogit.apply(q_BTHD, log_normalizer_BTH, *parameters)  # type: ignore[no-untyped-call]
        # an empty memory has no weight for any query
        return logit_BTH.masked_fill(log_normalizer_BTH <= EMPTY, -1e4)

    def contribution(self, q_BTHD: Tensor, memory: MemoryOutput) -> MemoryContribution:
        """The memory's contribution to the window's output."""
        read = memory.read_BTHV, memory.normalizer_BTH
        if self.spec.combine == "shared":
            return MemoryContribution(*read, self.memory_logit(q_BTHD, memory), None)
        return MemoryContribution(*read, None, self.mix_weight(q_BTHD.device))

    def mix_weight(self, device: torch.device) -> Tensor:
        """[H]: the memory's weight in a mix of two outputs, learned or fixed."""
        if self.spec.combine == "learned":
            return self.mix_H.float().sigmoid()
        return torch.full((self.dims.heads,), 0.5 if self.spec.combine == "fixed" else 1.0, device=device)

    def ablate(self, window_o_BTHV: Tensor, memory_BTHV: Tensor, branches: Branches) -> Tensor:
        """One branch alone. In a mix it keeps its weight; with a shared denominator it is normalized by itself."""
        one = window_o_BTHV if branches == "window" else memory_BTHV
        if self.spec.combine != "shared":
            weight_H1 = self.mix_weight(one.device)[:, None]
            one = one.float() * (1 - weight_H1 if branches == "window" else weight_H1)
        return one.to(window_o_BTHV.dtype)


def window_metadata(spec: MixerSpec, metadata: SequenceMetadata, past: LinearizedCacheLayer | None) -> WindowMetadata:
    """The window metadata of the batch for a layer with this spec and cache."""
    return metadata.for_window(spec.cache_window, spec.sinks, None if past is None else past.positions)


def extend(past: LinearizedCacheLayer | None, name: str, new: Tensor, window: WindowMetadata) -> Tensor:
    """[B,S,...]: the ring called `name` followed by `new`; updates the ring. Without a cache, only `new`."""
    return new if past is None else past.extend(name, new, window)


def _delay(stream_BSGX: Tensor, keep: int, tokens: int) -> Tensor:
    """[B,T,G,X]: at each new token, the token that leaves a ring of `keep` tokens; zeros if none does."""
    missing = keep + tokens - stream_BSGX.shape[1]
    stream_BSGX = F.pad(stream_BSGX, (0, 0, 0, 0, missing, 0)) if missing else stream_BSGX
    return stream_BSGX[:, :tokens]
