"""The forward and backward pass of a micro-batch as one CUDA graph.

A step of a small model mostly waits for launches: some forty kernels per layer, each from Python. A graph replays them
without Python. That needs batches whose values do not decide what is run. Where documents are kept apart in their rows,
the places where they begin decide it. Batches of other shapes have graphs of their own, which add to the same
gradients.
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
from liger_convert.model.cuda_graphs import capture
from liger_convert.model.placing import waits
from liger_convert.training.averaging import flat_like

# A batch -> its loss, detached; adds the gradients to `.grad`.
FwdBwd = Callable[[dict[str, Tensor]], Tensor]

# What transformers calls "sdpa" asks the positions, on the host, whether a row holds several documents, and then makes
# a mask. An attention that it knows no masks of is never given one.
MASKLESS = "sdpa_of_one_document"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)


def why_not_captured(stage: Stage, models: Iterable[Any], device: torch.device, exchanges: bool) -> str | None:
    """Why the passes of a stage, run through `models`, cannot be one CUDA graph, or None. exchanges: whether processes
    send each other something within them."""
    if device.type != "cuda":
        return "there is no Nvidia GPU"
    if not stage.compile:
        return "compile: false is set"
    if isinstance(stage, AlignStage) and stage.layerwise:
        return "hidden states are read from the disk and written to it (layerwise: true)"
    if not stage.concat_documents:
        return "the work depends on where documents begin in a row (concat_documents: true makes each row one text)"
    if exchanges:
        return "processes share the weights or the rows and exchange them in every layer"
    if stage.gradient_checkpointing:
        return "gradient checkpointing reads the state of the random number generator"
    for model in models:
        if waits(model):
            return "layers of the teacher are kept in host memory"
        if (attention := model.config._attn_implementation) != "sdpa":
            return f"the attention is {attention!r}, not 'sdpa'"
        if (reach := getattr(model.config, "sliding_window", None)) is not None and reach < stage.seq_len:
            return f"the base's own window of {reach} tokens needs a mask"
    return None


class CapturedFwdBwd:
    """`fwd_bwd` as one CUDA graph for each of the shapes of their batches, whose rows are one document each.

    Gradients add up in `.grad` as they do without, until it is None again. flat: they are parts of `flats`, of which
    `layout` tells whose gradients they are: where it is the same number, `flats` mean the same. It is 0 where there is
    none yet, or where there are gradients beside them.
    """

    def __init__(self, fwd_bwd: FwdBwd, parameters: list[nn.Parameter], models: list[Any], flat: bool = False):
        self.fwd_bwd, self.parameters, self.models, self.flat = fwd_bwd, parameters, models, flat
        self.flats: list[Tensor] = []
        self.layout = 0
        self.pool: Any = None
        self.replays: dict[tuple[torch.Size, ...], Callable[..., Tensor]] = {}
        self.grads: dict[nn.Parameter, Tensor] = {}  # what the graphs write to, of the parameters that get a gradient

    def capture(self, batch: dict[str, Tensor]) -> None:
        """Makes the graph for batches like this one, if there is none; leaves parameters, gradients and random numbers
        as they were. Raises RuntimeError where something cannot be captured, as when a value is looked at."""
        if self.knows(batch):
            return
        names, random = list(batch), torch.cuda.get_rng_state()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        before = [None if p.grad is None else (p.grad, p.grad.clone()) for p in self.parameters]

        def run(*given: Tensor) -> Tensor:
            return self.fwd_bwd(dict(zip(names, given, strict=True)))

        try:
            for p in self.parameters:
                p.grad = self.grads.get(p)
            with _maskless(self.models):
                run(*batch.values())  # finds out which parameters get a gradient at all, and compiles
                self._keep_gradients()
                self.replays[_shapes(batch)] = capture(run, tuple(batch.values()), list, self.pool)
        finally:
            for p, kept in zip(self.parameters, before, strict=True):
                p.grad = None if kept is None else kept[0].copy_(kept[1])
            torch.cuda.set_rng_state(random)

    def _keep_gradients(self) -> None:
        """Has all graphs from now on write to the gradients that there are, or to parts of `flats` in their place."""
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

    def knows(self, batch: dict[str, Tensor]) -> bool:
        """Whether there is a graph for batches like this one."""
        return _shapes(batch) in self.replays

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch, detached, by the graph for its shapes."""
        if fresh := [grad for p, grad in self.grads.items() if p.grad is None]:
            torch._foreach_zero_(fresh)
        for p, grad in self.grads.items():
            p.grad = grad
        return self.replays[_shapes(batch)](*batch.values()).clone()


def _shapes(batch: dict[str, Tensor]) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in batch.values())


@contextlib.contextmanager
def _maskless(models: Iterable[Any]) -> Iterator[None]:
    """Attention of `models` that looks at no position, as each row is one document."""
    before = [(model, model.config._attn_implementation) for model in models]
    try:
        for model, _ in before:
            model.set_attn_implementation(MASKLESS)
        yield
    finally:
        for model, attention in before:
            model.set_attn_implementation(attention)
