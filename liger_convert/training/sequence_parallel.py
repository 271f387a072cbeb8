"""Sequence parallelism: each row of a batch is cut into contiguous shards, one for each process of a group.

A linearized layer treats a shard like new tokens after a cache: the previous process holds what comes before them. That
process sends the keys and values of its last tokens (the halo), the sinks of the document that continues, and the
recurrent states. Gradients travel back the same way. Every mixer can scan from given initial states, so all work
unchanged, also with packed documents that span processes. Each process has the positions and documents of whole rows.

States are passed from neighbor to neighbor, not gathered. A process scans a layer after its left neighbor has, while
that neighbor proceeds to the next part of the model. So each process lags its neighbor by the scan of one layer, not of
all layers. Softmax layers synchronize all processes, and so do layers that are recomputed in the backward pass; each of
these pays the full lag. Gathering the decay and state of each process (LASP-2) would cost every layer a second pass
over its keys, codebook included. It would also need the transition of each recurrence, which is a matrix for the delta
rule.

Softmax layers, and the base, exchange heads for tokens with an all-to-all (Ulysses) if the key-value heads divide among
the processes: each process attends over the whole row with its share of the heads, so all have the same work. Otherwise
they all-gather the keys and values of all shards, and queries attend to those up to their own. The last process then
has the most work, 2 - 1/N times its share with N processes.

All processes of a group build the same autograd graph: the first one receives zeros as input, and the last one zeros as
gradients. So all backward passes send and receive in the same order.

Sources: LASP (2404.02882), LASP-2 (2502.07563), DeepSpeed-Ulysses (2309.14509).

Shapes: B batch, T tokens of a shard, P tokens of the halo, S = P + T, M sinks of all documents of a shard, H query
heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import PartialState
from gated_kernels.swa.chunk import chunk_swa
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.data.packed_rows import IGNORED
from liger_convert.mixers import MIXERS, SOFTMAX, make_spec
from liger_convert.mixers.base import Mixer
from liger_convert.model import LinearizedAttention
from liger_convert.model.families import own_windows
from liger_convert.model.sequence import Positions, SequenceMetadata, Sinks, WindowMetadata
from liger_convert.utils import processes
from liger_convert.utils.errors import BadInput

ATTENTION = "of_sequence_shards"  # the name under which the softmax layers' attention is registered in transformers
IN_FLIGHT = 8  # maximum number of unfinished sends whose tensors a process keeps


def check(stage: Stage, config: Any, shards: int) -> None:
    """Raises BadInput if the stage's rows cannot be cut into `shards` shards. config: of the linearized model."""
    if shards == 1:
        return
    if isinstance(stage, AlignStage) and stage.layerwise:
        raise BadInput(
            "sequence_parallel: align trains layer by layer, on whole rows, of which a GPU has only one layer's "
            "activations at a time; use 1, or leave layerwise out"
        )
    used = set(config.linearization["layers"]) - {SOFTMAX}
    specs = [config.linearization["mixers"][name] for name in sorted(used)]
    for spec in specs:
        if not MIXERS[spec["type"]].passes_states:
            raise BadInput(
                f"sequence_parallel: mixer {spec['type']} cannot pass its memory from one process to the next; use 1"
            )
        if make_spec(spec).shift != "none":
            raise BadInput(
                f"sequence_parallel: mixer {spec['type']} shifts tokens before its window, and the last of them is not "
                "passed from one process to the next; use 1, or leave kv_shift and token_shift out"
            )
        if not spec["window"]:
            raise BadInput(f"sequence_parallel: mixer {spec['type']} has an unlimited window; use 1, or a window")
    longest = max((make_spec(spec).window for spec in specs), default=1)
    for length in (stage.seq_len, *(other.seq_len for other in stage.mixed_seq_lens)):
        rows = f"sequence_parallel: {stage.kind} has rows of {length} tokens"
        if length % shards:
            raise BadInput(f"{rows}, which cannot be cut into {shards} equal shards; use a multiple of {shards}")
        if length // shards < longest:
            raise BadInput(
                f"{rows}, so a shard is shorter than the window of {longest}; use {longest * shards} or more"
            )
    if getattr(config, "attention_dropout", 0):
        raise BadInput(
            "sequence_parallel: config.json has an attention_dropout, which shards do not apply; set it to 0"
        )


def group_of(device: torch.device, shards: int) -> Group:
    """This process's group of `shards` consecutive ranks, so on one machine if they fit there. A collective call."""
    PartialState(cpu=device.type == "cpu")  # initializes torch.distributed if necessary
    names = ("rows", "sequence")
    return Group(init_device_mesh(device.type, (processes.count() // shards, shards), mesh_dim_names=names)["sequence"])


class Group:
    """The processes that share the rows of a batch, in the order of their shards. mesh: their one-dimensional mesh."""

    def __init__(self, mesh: DeviceMesh):
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.shard: Shard | None = None  # of the last batch
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Cuts this process's shard out of a batch of whole rows.

        The result also has the shard's `metadata` for the model. Its `labels` have one more token, the first of the
        next shard.
        """
        ids_BT = batch["input_ids"]
        row = SequenceMetadata.build(ids_BT, batch.get("position_ids"), None)
        self.shard = Shard(row, self)
        own = slice(self.shard.start, self.shard.start + self.shard.tokens)
        cut = {"input_ids": ids_BT[:, own], "position_ids": row.position_BT[:, own], "metadata": self.shard}
        if "labels" in batch:
            cut["labels"] = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, own.start : own.stop + 1]
        return cut

    def install(self, model: Any) -> None:
        """Makes the softmax layers of `model`, a base or a linearized model, attend to all shards. Changes `model`."""
        windows = own_windows(model.config)
        for layer, window in zip(model.model.layers, windows, strict=True):
            if not isinstance(layer.self_attn, LinearizedAttention):
                layer.self_attn.of_group = self, window
        model.set_attn_implementation(ATTENTION)

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the group (all-reduce), without gradients."""
        x = x.detach().clone()
        dist.all_reduce(x, group=self.group)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Sends `x` asynchronously to the process `to` ranks to the right, if there is one."""
        if 0 <= self.rank + to < self.size:
            x = x.contiguous()
            self._sent.append((dist.isend(x, group=self.group, group_dst=self.rank + to), x))
            while len(self._sent) > IN_FLIGHT:
                self._sent.popleft()[0].wait()

    def receive(self, like: Tensor, source: int) -> Tensor:
        """The tensor that the process `source` ranks to the right has sent, with the shape and dtype of `like`. Zeros
        if there is no such process."""
        if not 0 <= self.rank + source < self.size:
            return torch.zeros_like(like)
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(found, group=self.group, group_src=self.rank + source)
        return found


class Shard(SequenceMetadata):
    """The metadata of this process's shard. Its documents are numbered from that of the shard's first token."""

    def __init__(self, row: SequenceMetadata, group: Group):
        tokens = row.tokens // group.size
        self.start, self.row = group.rank * tokens, row
        super().__init__(tokens, self._of_row(row.position_BT, self.start, tokens), None, self._segments(tokens))
        self.documents = 1 if self.segment_ids_BT is None else int(self.segment_ids_BT.max()) + 1
        self.past = Before(self, group)

    def _for_window(self, cache_window: int, sinks: int, before: Positions | None) -> WindowMetadata:
        missing = max(0, cache_window - self.start)
        halo = self._of_row(self.row.position_BT, self.start - cache_window + missing, cache_window - missing)
        first_B = self.position_BT[:, 0]
        before = Positions(
            F.pad(halo, (missing, 0), value=-1),
            first_B,
            (first_B[:, None] - torch.arange(sinks, device=halo.device)).clamp_min(0) if sinks else None,
            self._segments(0, cache_window, missing),
            padded=missing > 0,
        )
        return super()._for_window(cache_window, sinks, before)

    def _segments(self, tokens: int, back: int = 0, missing: int = 0) -> Tensor | None:
        """The documents of the shard's first `tokens` tokens, and of the `back` tokens before the shard. The first
        `missing` of the latter lie before the row and get -1. None if rows are single documents."""
        of_row = self.row.segment_ids_BT
        if of_row is None:
            return None
        found = self._of_row(of_row, self.start - back + missing, back - missing + tokens)
        return F.pad(found - of_row[:, self.start : self.start + 1], (missing, 0), value=-1)

    @staticmethod
    def _of_row(x_BT: Tensor, start: int, tokens: int) -> Tensor:
        return x_BT[:, start : start + tokens]


class Before:
    """Takes the place of a layer's cache: reads come from the previous process, and writes go to the next one."""

    static = fused = False
    positions = None  # the shard has them

    def __init__(self, shard: Shard, group: Group):
        self.shard, self.group = shard, group

    def extend(self, name: str, new: Tensor, window: WindowMetadata) -> Tensor:
        """[B,S,...]: the halo from the previous process, followed by `new` [B,T,...]."""
        return torch.cat((_Halo.apply(new, window.cache_window, self.group), new), 1) if window.cache_window else new

    def read_sinks(self, name: str, new_BTGD: Tensor, sinks: Sinks) -> Tensor:
        """[B,M,G,D]: the keys or values of the continued document's sinks, then zeros for those of other documents."""
        assert sinks.index_BM is not None
        all_sinks = sinks.index_BM.shape[1]
        count = all_sinks // self.shard.documents
        received = self._receive(new_BTGD.new_empty(len(new_BTGD), count, *new_BTGD.shape[2:]))
        return F.pad(received, (0, 0, 0, 0, 0, all_sinks - count))

    def write_sinks(self, name: str, tokens_BMGD: Tensor) -> Tensor:
        """Sends the sinks of the last document to the next process. Returns all sinks, [B,M,G,D], for further use."""
        count, segments = tokens_BMGD.shape[1] // self.shard.documents, self.shard.segment_ids_BT
        last_BM = torch.arange(count, device=tokens_BMGD.device).expand(len(tokens_BMGD), -1)
        if segments is not None:
            last_BM = last_BM + segments[:, -1:] * count
        index = last_BM[:, :, None, None].expand(-1, -1, *tokens_BMGD.shape[2:])
        return _Send.apply(tokens_BMGD, tokens_BMGD.gather(1, index), self.group)

    def read_states(self, mixer: Mixer) -> dict[str, Tensor]:
        """The states of the continued document by name, in float32; zeros for rows in which a document begins here."""
        shapes, position_BT = mixer.cached_states(mixer.spec, mixer.dims), self.shard.position_BT
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        if not sizes:
            return {}
        flat = self._receive(position_BT.new_empty(len(position_BT), sum(sizes), dtype=torch.float32))
        flat = flat * (position_BT[:, :1] > 0)
        pieces = flat.split(sizes, 1)
        return {name: piece.unflatten(1, shape) for (name, shape), piece in zip(shapes.items(), pieces)}

    def write_states(self, states: dict[str, Tensor], read: Tensor, mixer: Mixer) -> Tensor:
        """Sends the states to the next process. Returns `read`, the memory's output, for further use."""
        names = mixer.cached_states(mixer.spec, mixer.dims)
        if not names:
            return read
        flat = torch.cat([states[name].flatten(1) for name in names], 1)
        return _Send.apply(read, flat, self.group)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all shards of the row, without gradients."""
        return self.group.total(x)

    def _receive(self, like: Tensor) -> Tensor:
        anchor = like.new_zeros((), requires_grad=torch.is_grad_enabled())
        return _Receive.apply(anchor, like, self.group)


class _Halo(torch.autograd.Function):
    """[B,P,...]: the last P tokens of the previous process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: Group) -> Tensor:
        ctx.shape, ctx.size, ctx.group = x.shape, size, group
        last = x[:, x.shape[1] - size :]
        group.send(last, 1)
        return group.receive(last, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.group.send(grads[0], -1)
        grad = grads[0].new_zeros(ctx.shape)
        grad[:, grad.shape[1] - ctx.size :] = ctx.group.receive(grads[0], 1)
        return grad, None, None


class _Receive(torch.autograd.Function):
    """The tensor that the previous process sends. anchor: a dummy that makes this part of every process's graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.receive(like, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.group.send(grads[0], -1)
        return grads[0].new_zeros(()), None, None


class _Send(torch.autograd.Function):
    """Sends `x` to the next process and returns `carrier` unchanged. Its backward pass receives the gradient of `x`."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.like = group, x.new_empty(()).expand(x.shape)
        group.send(x, 1)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.group.receive(ctx.like, 1), None


class _Gather(torch.autograd.Function):
    """[N,...]: the tensors of all N processes (all-gather). The backward pass reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        found = x.new_empty(group.size, *x.shape)
        dist.all_gather_into_tensor(found.flatten(0, 1), x, group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        own = torch.empty_like(grad[0])
        dist.reduce_scatter_tensor(own, grad.flatten(0, 1), group=ctx.group.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """[N,...]: what each of N processes sends to this one, from `x` [N,...] (all-to-all). Gradients go back the same
    way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, x.contiguous(), group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grads[0], ctx.group), None

    @staticmethod
    def of_tokens(x_BHTD: Tensor, group: Group) -> Tensor:
        """[B,H/N,S,D]: this process's heads at all tokens, from all heads at its shard's."""
        parts_NBHTD = torch.stack(x_BHTD.chunk(group.size, 1))
        found_NBHTD: Tensor = _Exchange.apply(parts_NBHTD, group)
        return found_NBHTD.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def of_heads(x_BSHD: Tensor, group: Group) -> Tensor:
        """[B,T,H,D]: all heads at its shard's tokens, from this process's heads at all tokens."""
        parts_NBTHD = torch.stack(x_BSHD.chunk(group.size, 1))
        found_NBTHD: Tensor = _Exchange.apply(parts_NBTHD, group)
        return found_NBTHD.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _attention(
    module: Any,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: a softmax layer over all shards. It uses the shard's documents and the
    base's own window, and gets no mask."""
    group, window = module.of_group
    if torch.is_autocast_enabled(q_BHTD.device.type):
        # autocast left queries and keys in float32: it does not recognize attention with a bias like the one below,
        # and no fused kernel takes float32
        dtype = torch.get_autocast_dtype(q_BHTD.device.type)
        q_BHTD, k_BGTD, v_BGTD = q_BHTD.to(dtype), k_BGTD.to(dtype), v_BGTD.to(dtype)
    segments = group.shard.row.segment_ids_BT
    options = {"scaling": scaling, "window": window, "softcap": softcap}
    if k_BGTD.shape[1] % group.size == 0:
        q_BHSD, k_BGSD, v_BGSD = (_Exchange.of_tokens(x, group) for x in (q_BHTD, k_BGTD, v_BGTD))
        return _Exchange.of_heads(_attend(q_BHSD, k_BGSD, v_BGSD, segments, **options), group), None
    end = (group.rank + 1) * q_BHTD.shape[2]
    kv_NBTGX = _Gather.apply(torch.cat((k_BGTD, v_BGTD), -1).transpose(1, 2), group)
    kv_BGSX = kv_NBTGX[: group.rank + 1].transpose(0, 1).flatten(1, 2).transpose(1, 2)
    k_BGSD, v_BGSD = kv_BGSX.split([k_BGTD.shape[-1], v_BGTD.shape[-1]], -1)
    return _attend(q_BHTD, k_BGSD, v_BGSD, None if segments is None else segments[:, :end], **options), None


def _attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    segment_ids_BS: Tensor | None,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal softmax attention [B,T,H,D] of the last T of S tokens."""
    tokens, end = q_BHTD.shape[2], k_BGSD.shape[2]
    if segment_ids_BS is None and window is None and softcap is None:
        # fused kernels, for the longest rows: an op that materializes the scores would run out of memory
        bias = causal_lower_right(tokens, end)
        o_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSD, attn_mask=bias, scale=scaling, enable_gqa=True)
        return o_BHTD.transpose(1, 2)
    o_BTHD, _ = chunk_swa(
        q_BHTD.transpose(1, 2),
        k_BGSD.transpose(1, 2),
        v_BGSD.transpose(1, 2),
        window_size=window or end,
        scale=scaling,
        segment_ids_BS=segment_ids_BS,
        softcap=softcap,
    )
    return o_BTHD


AttentionInterface.register(ATTENTION, _attention)
