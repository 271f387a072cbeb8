"""The forward and backward pass of a micro-batch as one CUDA graph.

A small model spends most of a step on launches: some forty kernels per layer, each launched from Python. A graph
replays them without Python. This requires that the values in a batch do not affect which kernels run. So attention
masks are made on the device, and rows of several documents all have room for as many as the stage's fullest row. Each
batch shape has its own graph, and all graphs add to the same gradients.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.model.cuda_graphs import SharedMemory, capture, without_cached_casts
from liger_convert.model.packing import document_ids
from liger_convert.model.placing import waits
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.training.gradient_averaging import flat_like

# Takes a batch and returns its detached loss; adds the gradients to `.grad`.
FwdBwd = Callable[[dict[str, Tensor]], Tensor]

# With "sdpa", transformers checks the positions on the host for rows of several documents, and then builds a mask. It
# passes no mask to an attention implementation for which no mask function is registered.
MASKLESS, APART = "sdpa_of_one_document", "sdpa_of_documents"


def attend_within_one_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' causal attention [B,T,H,D] for queries, keys and values [B,H,T,D] of rows that are one document.

    sliding_window: how many tokens a query of the base's layer sees, itself included. Their mask is made on the device.
    """
    if sliding_window is not None and sliding_window < query.shape[2]:
        attention_mask = _seen(query, sliding_window)[None, None]
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return found


def attend_within_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' causal attention [B,T,H,D] for queries, keys and values [B,H,T,D] of rows of several documents.

    position_ids: [B or 1,T], restarting at every document. sliding_window: see `attend_within_one_document`.
    """
    document_BT = document_ids(position_ids)
    mask_B1TT = (_seen(query, sliding_window) & (document_BT[:, :, None] == document_BT[:, None]))[:, None]
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask_B1TT, **options)
    return found


def _seen(query: Tensor, sliding_window: int | None) -> Tensor:
    """bool [T,T]: which tokens the queries [B,H,T,D] of a row see, as far as their places tell."""
    i = torch.arange(query.shape[2], device=query.device)
    distance_TT = i[:, None] - i
    seen_TT = distance_TT >= 0
    return seen_TT if sliding_window is None else seen_TT & (distance_TT < sliding_window)


AttentionInterface.register(MASKLESS, attend_within_one_document)
AttentionInterface.register(APART, attend_within_documents)


def why_not_captured(stage: Stage, models: Iterable[Any], device: torch.device, exchanges: bool) -> str | None:
    """Why the forward and backward pass of a stage cannot be captured as one CUDA graph, or None if it can.

    models: all models that the pass runs, the teacher included. exchanges: whether processes communicate within it.
    """
    if device.type != "cuda":
        return "there is no Nvidia GPU"
    if not stage.compile:
        return "compile: false is set"
    if exchanges:
        return "processes share the weights or the rows and exchange them in every layer"
    if stage.gradient_checkpointing:
        return "gradient checkpointing reads the state of the random number generator"
    by_layer = isinstance(stage, AlignStage) and stage.layerwise  # loads the only layer that runs before it trains
    for model in models:
        if waits(model) and not by_layer:
            return "layers of the teacher are kept in host memory"
        if (attention := model.config._attn_implementation) != "sdpa":
            return f"the attention is {attention!r}, not 'sdpa'"
    return None


class CapturedFwdBwd:
    """`fwd_bwd` as a CUDA graph, one for each batch shape.

    most_documents: the documents of the fullest row, if rows have several. `position_ids` of a batch then restart at
    each, and `fwd_bwd` also gets `metadata`, for which none of them is read on the host. None: every row of a batch is
    a single document.

    Gradients accumulate in `.grad` as in eager mode, until `.grad` is set to None.

    outputs: lists what the last pass has left on the device besides its loss. A replay sets `copies` to copies of it,
    since the next one overwrites it. Reading it, as anything else that is not work of the device, is not for `fwd_bwd`
    itself: a capture runs it several times, and a replay runs none of its Python.

    flat: whether the gradients are views of the tensors in `flats`. `layout` then identifies the parameters whose
    gradients `flats` holds: equal numbers mean equal layouts. It is 0 before the first capture, and when some gradients
    lie outside `flats`.
    """

    def __init__(
        self,
        fwd_bwd: FwdBwd,
        parameters: list[nn.Parameter],
        models: list[Any],
        flat: bool = False,
        outputs: Callable[[], tuple[Tensor, ...]] = tuple,
        most_documents: int | None = None,
    ):
        self.fwd_bwd, self.parameters, self.models, self.flat = fwd_bwd, parameters, models, flat
        self.outputs, self.most_documents = outputs, most_documents
        self.copies: list[Tensor] = []
        self.flats: list[Tensor] = []
        self.layout = 0
        self.replays: dict[tuple[torch.Size, ...], Callable[..., tuple[Tensor, ...]]] = {}
        self.memory: SharedMemory | None = None
        self.grads: dict[nn.Parameter, Tensor] = {}  # the buffers that the graphs write gradients to

    def capture(self, batch: dict[str, Tensor]) -> None:
        """Captures the graph for batches of this shape, unless there is one. Leaves parameters, gradients and the
        random state unchanged. Raises RuntimeError if something cannot be captured, such as a read of a value by the
        host."""
        if self.knows(batch):
            return
        names, random = list(batch), torch.cuda.get_rng_state()
        self.memory = self.memory or SharedMemory()
        before = [None if p.grad is None else (p.grad, p.grad.clone()) for p in self.parameters]

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            inputs: dict[str, Any] = dict(zip(names, given, strict=True))
            if self.most_documents is not None:
                ids_BT, positions_BT = inputs["input_ids"], inputs["position_ids"]
                known = SequenceMetadata.build(ids_BT, positions_BT, None, most_documents=self.most_documents)
                inputs["metadata"] = known
            loss = self.fwd_bwd(inputs)
            return loss, *self.outputs()

        try:
            for p in self.parameters:
                p.grad = self.grads.get(p)
            attention = MASKLESS if self.most_documents is None else APART
            with _attending(self.models, attention), without_cached_casts():
                with self.memory.used():  # a warm-up: compiles, and finds out which parameters get a gradient at all
                    run(*batch.values())
                self._keep_gradients()
                self.replays[_shapes(batch)] = capture(run, tuple(batch.values()), list, self.memory)
        finally:
            for p, kept in zip(self.parameters, before, strict=True):
                p.grad = None if kept is None else kept[0].copy_(kept[1])
            torch.cuda.set_rng_state(random)

    def _keep_gradients(self) -> None:
        """Makes all further graphs write to the existing gradients, or to views of `flats` that replace them."""
        found = {p: p.grad for p in self.parameters if p.grad is not None}
        if self.flat and not self.grads:
            parts, self.flats = flat_like(list(found.values()))
            found = dict(zip(found, parts, strict=True))
            for p, part in found.items():
                p.grad = part
            self.layout = 1 + zlib.crc32(bytes(p in found for p in self.parameters))
        elif len(found) > len(self.grads):
            self.layout = 0
        self.grads = found

    def forget(self) -> None:
        """Drops all graphs and gives their memory back. The gradients stay."""
        self.replays.clear()
        self.memory = None
        torch.cuda.empty_cache()

    def knows(self, batch: dict[str, Tensor]) -> bool:
        """Whether there is a graph for batches of this shape."""
        return _shapes(batch) in self.replays

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """Replays the graph for this batch's shape and returns the detached loss."""
        if fresh := [grad for p, grad in self.grads.items() if p.grad is None]:
            torch._foreach_zero_(fresh)
        for p, grad in self.grads.items():
            p.grad = grad
        loss, *self.copies = (x.clone() for x in self.replays[_shapes(batch)](*batch.values()))
        return loss


def _shapes(batch: dict[str, Tensor]) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in batch.values())


@contextlib.contextmanager
def _attending(models: Iterable[Any], how: str) -> Iterator[None]:
    """Context in which `models` use the attention implementation `how`, which looks at no value on the host."""
    before = [(model, model.config._attn_implementation) for model in models]
    try:
        for model, _ in before:
            model.set_attn_implementation(how)
        yield
    finally:
        for model, attention in before:
            model.set_attn_implementation(attention)
