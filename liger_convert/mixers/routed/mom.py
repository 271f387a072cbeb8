"""Mixture of memories (2502.13685): a token writes and reads k of N memories of another mixer, plus a shared one.

r_t = x_t W,   g_t = softmax over the k largest of r_t                        (one W per key-value head, or per layer)
S_m(t) = the inner mixer's update of S_m(t-1) if token t chose m, else exactly S_m(t-1)
o_t = (e^{c_s} o_s + sum_m g_tm e^{c_m} o_m) / (e^{c_s} + sum_m g_tm e^{c_m})      (log normalizers c of the reads o)

The outputs of memories without a normalizer are added: o_s + sum_m g_tm o_m. All memories share the features and gates
of one mixer, whereas the paper has separate projections. The choice for a token does not depend on other tokens. Of
equal logits, the first memory's wins. `short_conv: 4`, `output_norm: rms` and `output_gate` are the pieces around the
paper's memories. The convolution runs over the document before the router divides it: the authors' code convolves what
is divided, where in training it reaches into the next memory's tokens.

A memory's scan covers only the tokens that write or read it (see memory_rows.py). A token is in the rows of k memories.
With `scope: evicted`, a token is written long after it has read, so it can be in the rows of 2 k memories.

Sometimes the lengths of such rows may not be read from tensors. Then every memory runs over all tokens, with zeros for
those that did not choose it. The exception is a router for all heads in a call that keeps no state: there, an upper
bound of the total length is known in advance.

Shapes: B batch, T tokens, C hidden size, H query heads, G key-value heads, N memories, S = N + the shared one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from gated_kernels.common.tracing import reads_no_values
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, Method, Mixer, MixerSpec
from liger_convert.mixers.calibration import Calibration
from liger_convert.mixers.options import make_spec, resolve_spec
from liger_convert.mixers.registry import MIXERS, register_mixer
from liger_convert.mixers.routed.memory_rows import MemoryRows, make_joined_row, make_rows
from liger_convert.mixers.spec import ReadSpec, ShortConvSpec
from liger_convert.utils.errors import BadInput


@dataclass(frozen=True)
class MoMSpec(ReadSpec):
    """Options of the router and of the memories. Those of ReadSpec are of all memories together.

    memories: N, the number of memories to choose from. The size of the state is proportional to it.
    active: k, the number of memories that each token writes and reads.
    shared: whether one more memory takes in every token, whatever the router chooses.
    balance: the weight of a loss that keeps the router from always choosing the same memories. The loss of a layer is
        N sum_m f_m p_m, where f_m is the share of all choices that memory m gets, and p_m its mean probability. It is 1
        if all memories are chosen equally often. The authors' code weights k times such a loss over all layers by 1e-2,
        which for k = 2 and 20 layers is 1e-3 per layer.
    router: who chooses: each key-value `head` for itself, or all heads of a `layer` together, as published.
    inner: the mixer that each memory is: its `type` and its options, without those of MixerSpec.
    """

    memories: int = 4
    active: int = 2
    shared: bool = True
    balance: float = 1e-3
    router: Literal["head", "layer"] = "head"
    inner: dict[str, Any] = field(default_factory=lambda: {"type": "gla"})

    def __post_init__(self) -> None:
        with contextlib.suppress(BadInput):  # which problem() says
            object.__setattr__(self, "inner", self._resolved())

    def _common(self) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in fields(MixerSpec)}

    def _resolved(self) -> dict[str, Any]:
        """`inner` with its defaults, without the options that all memories share."""
        common = self._common()
        for name in common.keys() & self.inner.keys():
            raise BadInput(f"inner.{name}: is the same for all memories; give it next to inner")
        resolved = resolve_spec({**self.inner, **common}, "inner")
        return {name: value for name, value in resolved.items() if name not in common}

    def inner_mixer(self) -> tuple[type[Mixer], MixerSpec]:
        """The class and options of the memories. The mixture has the window and combines it, so they have neither."""
        common = self._common() | {"combine": "fixed", "forget": False}
        return MIXERS[self.inner["type"]], make_spec({**self.inner, **common})

    def inner_types(self) -> tuple[str, ...]:
        return (self.inner["type"],)

    def problem(self) -> str | None:
        if not 1 <= self.active <= self.memories:
            return f"active: {self.active} is not between 1 and the number of memories, {self.memories}"
        if self.balance < 0:
            return f"balance: {self.balance} is negative; use 0 for none"
        inner = MIXERS.get(self.inner.get("type", ""))
        if inner is not None and inner.recurrence in ("none", MoM.recurrence):
            return f"inner.type: {inner.name} is not a memory of its own; use another mixer"
        if problem := super().problem():
            return problem
        try:
            self._resolved()
        except BadInput as error:
            return str(error)
        inner_spec = self.inner_mixer()[1]
        if inner_spec.conv_taps:
            return "inner.short_conv: runs before all memories; give short_conv next to inner"
        if self.short_conv and not isinstance(inner_spec, ShortConvSpec):
            return f"short_conv: {self.inner['type']} takes no convolved keys; use 0, or another inner mixer"
        if self.short_conv and getattr(inner_spec, "rope", False):
            return "short_conv: works on queries and keys before rotary; use inner.rope: false, or short_conv: 0"
        if inner_spec.shift != "none":
            return "inner.token_shift: would run before all memories, which a mixture does not support; leave it out"
        if inner_spec.pairs:
            return "inner.persistent: belongs to the window, which a mixture has only once; leave it out"
        if any(inner_spec.read_pieces):
            return "inner.output_gate: like output_norm, it comes after all memories; give both next to inner"
        return None


@register_mixer("mom")
class MoM(Mixer):
    summary = "mixture of memories: a router sends each token to a few of several memories of another mixer"
    gate_rule = "the inner mixer's"
    left_out = (
        "separate projections of keys, values and gates for each memory; off by default: `short_conv` with "
        "`conv_activation: silu` (before the router divides the tokens), `output_norm`, `output_gate` with "
        "`output_gate_activation: silu`"
    )
    recurrence = "routed"
    passes_states = False  # its balance is a mean over whole rows
    Spec = MoMSpec
    spec: MoMSpec

    def __init__(self, spec: MoMSpec, dims: HeadDims):
        super().__init__(spec, dims)
        inner, options = spec.inner_mixer()
        self.inner = inner(options, dims)
        self.routers = dims.kv_heads if spec.router == "head" else 1
        self.router_GNC = nn.Parameter(torch.empty(self.routers, spec.memories, dims.hidden))

    def forward(self, method: Method, *inputs: Any, bound: Callable[..., Tensor] | None = None) -> Tensor:
        o_BTHV: Tensor = self.inner(method, *inputs, bound=getattr(self, method) if bound is None else bound)
        return o_BTHV

    def calibration(self) -> Calibration:
        # the inner mixer's scale is of one memory's read
        return self.inner.calibration()._replace(read_size=super().calibration().read_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.inner.reset_parameters()
        # nearly equal weights, but choices that differ between tokens: with zeros all would go to the first k
        init.normal_(self.router_GNC, std=0.1 * self.dims.hidden**-0.5)

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, MoMSpec)
        inner, options = spec.inner_mixer()
        shapes = inner.state_shape(options, dims)
        return {name: (spec.memories + spec.shared, *shape) for name, shape in shapes.items()}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        assert isinstance(spec, MoMSpec)
        inner, options = spec.inner_mixer()
        return spec.memories, *inner.deferred_input_sizes(options, dims)

    def route(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B,T,G,N] in float32, and whether each memory is among a token's top k (ties: the first ones)."""
        with torch.autocast(x_BTC.device.type, enabled=False):  # rounded logits would tie
            logits_BTGN = torch.einsum("btc,gnc->btgn", x_BTC.float(), self.router_GNC.float())
        logits_BTGN = logits_BTGN.expand(-1, -1, self.dims.kv_heads, -1)
        chosen = logits_BTGN.argsort(dim=-1, descending=True, stable=True)[..., : self.spec.active]
        return logits_BTGN, torch.zeros_like(logits_BTGN, dtype=torch.bool).scatter(-1, chosen, True)

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        logits_BTGN, chosen_BTGN = self.route(qkv.x_BTC)
        if self.training and torch.is_grad_enabled():
            self.auxiliary_loss = self.spec.balance * self._imbalance(logits_BTGN, chosen_BTGN, qkv)
        # first, because the short convolution takes the last one for the key
        return chosen_BTGN.to(qkv.k_BTGD.dtype), *self.inner.deferred_inputs(qkv)

    def _imbalance(self, logits_BTGN: Tensor, chosen_BTGN: Tensor, qkv: QKV) -> Tensor:
        """N sum_m f_m p_m, averaged over rows and heads; 1 when balanced. Padding does not count."""
        valid_BT = (qkv.position_BS[:, -logits_BTGN.shape[1] :] >= 0).float()
        weight_BT11 = (valid_BT / valid_BT.sum(1, keepdim=True).clamp_min(1))[..., None, None]
        f_BGN = (weight_BT11 * chosen_BTGN).sum(1) / self.spec.active
        p_BGN = (weight_BT11 * logits_BTGN.softmax(-1)).sum(1)
        return self.spec.memories * (f_BGN * p_BGN).sum(-1).mean()

    def with_own_token(self, memory: MemoryOutput, qkv: QKV) -> MemoryOutput:
        return self.inner.with_own_token(memory, qkv)  # once, not for each memory

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        chosen_BTGN, *inner = inputs
        chosen_BTGS = F.pad(chosen_BTGN, (int(self.spec.shared), 0), value=1)
        return *self.inner.write(tuple(inner), v_BTGV), chosen_BTGS

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        return self._scan(qkv, entries, states, segment_ids_BT, exclusive, keeps_states=True)

    def scan_reads(
        self, qkv: QKV, entries: tuple[Tensor, ...], segment_ids_BT: Tensor | None, exclusive: bool
    ) -> MemoryOutput:
        return self._scan(qkv, entries, {}, segment_ids_BT, exclusive, keeps_states=False)[0]

    def _rows(
        self,
        writes_BTGN: Tensor,
        reads_BTGN: Tensor,
        segment_ids_BT: Tensor | None,
        exclusive: bool,
        keeps_states: bool,
    ) -> MemoryRows | None:
        """The rows that the memories run over; None if each runs over all tokens."""
        of_router = writes_BTGN[:, :, : self.routers], reads_BTGN[:, :, : self.routers]
        if may_read_values(writes_BTGN):
            return make_rows(*of_router, segment_ids_BT)
        most = self.spec.active * (2 if exclusive else 1)
        if self.routers > 1 or keeps_states or most >= self.spec.memories:
            return None
        return make_joined_row(*of_router, segment_ids_BT, most)

    def _scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
        keeps_states: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        *of_all, written_BTGS = entries
        logits_BTGN, chosen_BTGN = self.route(qkv.x_BTC)
        before = [{name: state[:, m] for name, state in states.items()} for m in range(written_BTGS.shape[-1])]
        qkv, of_token = self.inner.map_once(qkv, tuple(of_all))
        memories: list[MemoryOutput] = []
        after: list[dict[str, Tensor]] = []
        if self.spec.shared:
            memory, state = self.inner.scan(qkv, of_token, before.pop(0), segment_ids_BT, exclusive)
            memories.append(memory)
            after.append(state)
        writes_BTGN = written_BTGS[..., int(self.spec.shared) :].bool()
        rows = self._rows(writes_BTGN, chosen_BTGN, segment_ids_BT, exclusive, keeps_states)
        if rows is not None:
            first = before if states else [{} for _ in rows.lengths]
            each = zip(rows.queries(qkv), rows.entries(of_token), first, rows.segment_ids(), strict=True)
            routed = [self.inner.scan(*of_memory, exclusive) for of_memory in each]
            index_BTGK = chosen_BTGN.byte().argsort(dim=-1, descending=True, stable=True)[..., : self.spec.active]
            memories += rows.reads([memory for memory, _ in routed], index_BTGK[:, :, : self.routers])
            log_g = logits_BTGN.gather(-1, index_BTGK).log_softmax(-1)
        else:
            routed = []
            for state, writes_BTG1 in zip(before, writes_BTGN[..., None, :].unbind(-1), strict=True):
                own = tuple(entry.masked_fill(~writes_BTG1, 0) for entry in of_token)
                routed.append(self.inner.scan(qkv, own, state, segment_ids_BT, exclusive))
            memories += [memory for memory, _ in routed]
            log_g = logits_BTGN.masked_fill(~chosen_BTGN, -torch.inf).log_softmax(-1)
        after += [state for _, state in routed]
        names = after[0] if keeps_states else ()
        new_states = {name: torch.stack([state[name] for state in after], 1) for name in names}
        return self._read(qkv, memories, log_g), new_states

    def _read(self, qkv: QKV, memories: list[MemoryOutput], log_g: Tensor) -> MemoryOutput:
        """All reads combined. The shared memory's comes first and counts in full; the router weights the others."""
        log_g = F.pad(log_g, (int(self.spec.shared), 0))
        log_g = log_g.repeat_interleave(self.dims.heads // self.dims.kv_heads, 2)
        normalizers = [log_BTH for memory in memories if (log_BTH := memory.log_normalizer_BTH) is not None]
        log_normalizer_BTH = None
        if normalizers:
            log_g = torch.stack(normalizers, -1) + log_g
            log_normalizer_BTH = log_g.logsumexp(-1)
            log_g = log_g.log_softmax(-1)
        weights = log_g.exp()[..., None, :].unbind(-1)
        o_BTHV = sum(weight * memory.o_BTHV.float() for weight, memory in zip(weights, memories, strict=True))
        assert isinstance(o_BTHV, Tensor)
        return MemoryOutput(o_BTHV.to(qkv.v_BSGD.dtype), log_normalizer_BTH)


def may_read_values(x_BTGN: Tensor) -> bool:
    """Whether the lengths of rows may be read from tensors.

    Not on a GPU, where a step may be captured as a CUDA graph, nor in compiled layers, which would be recompiled for
    every length.
    """
    return x_BTGN.shape[1] > 1 and x_BTGN.device.type == "cpu" and not reads_no_values()
