"""Selects the layers that stay softmax by training one gate per layer, all at once.

A layer runs both of its attentions on the same input and returns g * softmax + (1 - g) * linear, with a gate g between
0 and 1. All weights are frozen. The gates are trained to keep the base's next-token distribution on text with repeated
stretches, while a penalty pushes their sum to the number of softmax layers. The layers with the largest gates stay
softmax (DASH, 2605.20936; FlashMorph, 2606.30562). Both papers align the linear attentions first. Here they are
calibrated in closed form, as in `layer_selection`, and not trained.

Because all gates are trained together, layers that help only in combination are found, and the cost of a step does not
depend on the number of layers to choose. A search by measurement costs a pass for every layer that it tries.

Shapes: B batch, T tokens of a row, N = B * T, C hidden size, V vocabulary, L layers to choose from.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

from liger_convert.config.layers import LayerChoice
from liger_convert.config.recipe import Recipe
from liger_convert.data.documents import Document
from liger_convert.data.packed_rows import PackedDataset, collate, pack
from liger_convert.mixers import SOFTMAX
from liger_convert.model.bases import context_length
from liger_convert.pipeline.layer_selection import (
    LayerSelection,
    Switch,
    copying,
    span,
)
from liger_convert.pipeline.plan import Plan
from liger_convert.training.losses import kl_divergence, next_tokens, summed
from liger_convert.utils.device import autocast, compute_dtype
from liger_convert.utils.errors import LinearizeError
from liger_convert.utils.progress import Report

ROWS = 8  # of an optimizer step
MICRO_ROWS = 2  # of a step that are processed at once
RATE = 0.1  # Adam's learning rate, falling linearly to 0: in a hundred steps a gate can come within 1% of 0 or 1
# Weight of the penalty, the squared relative error of the gates' sum. Its target is the number of softmax layers. The
# KL loss is 1 with all layers linear, so each softmax layer lowers it by about 1 / target, and the sum may end at up to
# 1.5 times the target. A larger weight would bring it closer but hide how gates differ, and only their order counts.
PENALTY = 1.0


@dataclass(frozen=True)
class GateSelection(LayerSelection):
    """gates: of every layer that there is to choose from, after training. path: the softmax layers, the one with the
    largest gate first. `swapped` and `restored` are empty, because no layer is measured alone."""

    gates: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        gates = [{"layer": i, "gate": gate} for i, gate in self.gates.items()]
        return super().to_dict() | {"select": "gates", "layers": gates}

    def render(self) -> Group:
        """Two tables for a terminal: every layer's gate, and the softmax layers with the losses reached."""
        order = {layer: f"{place}." for place, (layer, _) in enumerate(self.path, 1)}
        layers = Table("layer", "gate", "chosen")
        for i, gate in self.gates.items():
            layers.add_row(str(i), f"{gate:.3f}", order.get(i, ""))
        _, path = super().render().renderables
        return Group(layers, path)


def select_by_gates(
    recipe: Recipe, plan: Plan, switch: Switch, tokenizer: Any, documents: Sequence[Document], report: Report
) -> GateSelection:
    """Chooses the softmax layers that `plan` leaves undecided, between the attentions of `switch`, by gates trained on
    `layers.select_tokens` tokens of `documents`.

    Memory holds the weights of the base and of the linearized model, and what the backward pass of MICRO_ROWS rows
    needs, so nothing of `switch` may be offloaded. The same seed gives the same gates. Raises LinearizeError if a loss
    is not finite.
    """
    assert isinstance(recipe.layers, LayerChoice)
    count, length = plan.undecided, span(plan)
    size = min(4 * length, max(2 * length, context_length(switch.model.config) or 4 * length))
    steps = max(1, recipe.layers.select_tokens // (ROWS * size))
    rows = pack(documents, size, steps * ROWS * size, recipe.seed, copy_fraction=1.0)
    total = steps + count + 2
    dtype = compute_dtype(switch.device, recipe.precision)
    with autocast(switch.device, dtype):
        gates = train_gates(switch, count, rows, lambda done, note: report(done, total, note))
    measure = copying(switch, tokenizer, documents, length, dtype)
    chosen = largest(gates, count)
    measured = []
    for softmax in (switch.layers, *(chosen[:kept] for kept in range(count + 1))):
        measured.append(measure(softmax))
        report(steps + len(measured), total)
    base, linear, *reached = measured
    return GateSelection(base, linear, {}, {}, list(zip(chosen, reached, strict=True)), gates)


def largest(gates: dict[int, float], count: int) -> list[int]:
    """The `count` layers with the largest gates, the largest first. Ties go to the lower layer."""
    return sorted(gates, key=lambda i: (-gates[i], i))[:count]


def train_gates(
    switch: Switch, count: int, rows: PackedDataset, report: Callable[[int, str], None]
) -> dict[int, float]:
    """The gates of the layers of `switch` after training on all `rows`, ROWS per step, for `count` softmax layers.

    The loss is KL(base || gated model), divided by that of the model with all layers linear, plus the penalty for a sum
    of gates other than `count`. report: called with the steps done and a note. Raises LinearizeError if the loss is not
    finite.
    """
    device = switch.device
    for softmax in (switch.layers, []):
        switch.set_softmax(softmax).requires_grad_(False)
    with torch.no_grad():
        parts = [_divergence(switch, part, lambda: switch.set_softmax(())) for part in _parts(rows, 0, device)]
        linear = torch.stack(parts).sum()
    logits_L = torch.zeros(len(switch.choices), device=device, requires_grad=True)
    optimizer = torch.optim.Adam([logits_L], lr=RATE)
    steps = len(rows) // ROWS
    with gated(switch, logits_L) as mixed:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
            optimizer.zero_grad()
            loss = 0.0
            for part in _parts(rows, step, device):
                kl = _divergence(switch, part, mixed) / linear
                kl.backward()
                loss += kl.item()
            if not math.isfinite(loss):
                why = f"the loss is {loss} at step {step + 1} of {steps}"
                raise LinearizeError(f"layers.select: the gates cannot be trained because {why}; set it to copy")
            (PENALTY * (logits_L.sigmoid().sum() / count - 1).square()).backward()
            optimizer.step()
            report(step + 1, f"{loss:.3f} of the linear model's loss")
    return dict(zip(switch.choices, logits_L.sigmoid().tolist(), strict=True))


@contextlib.contextmanager
def gated(switch: Switch, logits_L: Tensor) -> Iterator[Callable[[], Any]]:
    """Yields a function that sets `switch` to the model whose attentions are mixed with the gates sigmoid(logits_L) and
    returns it. It works only within the context."""

    def mix(n: int, softmax: Any) -> Any:
        def hook(linear: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, None]) -> Any:
            angles = kwargs["position_embeddings"][:2]  # without what `hand_on_metadata` appends
            softmax_BTC = softmax(*args, **kwargs | {"position_embeddings": angles})[0]
            return torch.lerp(output[0], softmax_BTC, logits_L[n].sigmoid().to(softmax_BTC.dtype)), None

        return hook

    def mixed() -> Any:
        model = switch.set_softmax(())
        # if its config had no softmax layer, the model would make no mask for the softmax attentions
        model.config.linearization["layers"][switch.choices[0]] = SOFTMAX
        return model

    hooks = [
        switch.linear[i].register_forward_hook(mix(n, switch.attentions[i]), with_kwargs=True)
        for n, i in enumerate(switch.choices)
    ]
    try:
        yield mixed
    finally:
        for hook in hooks:
            hook.remove()


def _divergence(switch: Switch, ids_BT: Tensor, student: Callable[[], Any]) -> Tensor:
    """KL(base || student), summed over these rows and divided by the number of tokens of a step with a next token."""
    with torch.no_grad():
        teacher_NV = switch.set_base()(ids_BT, use_cache=False).logits.flatten(0, 1)
    logits_NV, next_N = student()(ids_BT, use_cache=False).logits.flatten(0, 1), next_tokens(ids_BT)
    total = summed(logits_NV, lambda piece_NV, chunk: kl_divergence(piece_NV, teacher_NV[chunk], next_N[chunk], 1.0))
    return total / (ROWS * (ids_BT.shape[1] - 1))


def _parts(rows: PackedDataset, step: int, device: torch.device) -> Iterator[Tensor]:
    """The token ids of a step's rows, [MICRO_ROWS, T] at a time."""
    for first in range(step * ROWS, (step + 1) * ROWS, MICRO_ROWS):
        yield collate([rows[i] for i in range(first, first + MICRO_ROWS)])["input_ids"].to(device)
