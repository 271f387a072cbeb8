"""Selects by measurement the linear layers that get a longer window.

A memory of constant size loses more in some layers than in others. With a longer window in those, the cache still does
not grow with the text. Every linear layer is measured with the longer window in it alone, by the model's KL divergence
from the base on rows like those of a distillation, and the layers with the lowest divergence are chosen. The softmax
layers are already chosen. Mixers are calibrated but not trained, as in `layer_selection`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from liger_convert.config.names import LONG
from liger_convert.config.recipe import Recipe
from liger_convert.data.documents import Document
from liger_convert.model import LinearizedAttention
from liger_convert.pipeline.layer_selection import Measure, Switch, divergence, finite_or_none, span
from liger_convert.pipeline.plan import Plan
from liger_convert.utils.device import compute_dtype
from liger_convert.utils.progress import Report

COPIES = 0.3  # fraction of the rows with a copy, as in the recipes' first distillation


@dataclass(frozen=True)
class WindowSelection:
    """The result of a selection: KL divergences from the base in nats per token.

    window: the longer window. without: no layer has it. alone: by layer, this layer alone has it. chosen: the layers
    that get it. together: all of these have it.
    """

    window: int
    without: float
    alone: dict[int, float]
    chosen: list[int]
    together: float

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON. A divergence that is not finite is null."""
        return {
            "long_windows": self.chosen,
            "long_window": self.window,
            "window_kl": {
                "without": finite_or_none(self.without),
                "alone": {str(i): finite_or_none(kl) for i, kl in self.alone.items()},
                "together": finite_or_none(self.together),
            },
        }

    def render(self) -> Table:
        """A table for a terminal: every linear layer with the longer window alone, the best first."""
        table = Table("layer", f"window {self.window} in it alone: kl", "chosen")
        table.columns[1].justify = "right"
        table.add_row("none", f"{self.without:.4f}", "")
        for i in sorted(self.alone, key=self.alone.__getitem__):
            table.add_row(str(i), f"{self.alone[i]:.4f}", "yes" if i in self.chosen else "")
        table.add_row("all chosen", f"{self.together:.4f}", "")
        return table


def select_windows(
    recipe: Recipe,
    plan: Plan,
    softmax: Collection[int],
    switch: Switch,
    documents: Sequence[Document],
    report: Report,
) -> WindowSelection:
    """Chooses the layers whose longer window `plan` leaves undecided, among the linear attentions of `switch`, on text
    of `documents`. softmax: the layers that stay softmax."""
    long = with_long_windows(switch)
    dtype = compute_dtype(switch.device, recipe.precision)
    measure = divergence(switch, documents, span(plan), dtype, recipe.seed, COPIES)
    linear = [i for i in switch.choices if i not in softmax]
    total, done = len(linear) + 2, 0

    def kl(layers: Collection[int]) -> float:
        nonlocal done
        done += 1
        report(done, total)
        return _measured(switch, long, layers, frozenset(softmax), measure)

    without = kl(())
    alone = {i: kl((i,)) for i in linear}
    chosen = sorted(sorted(linear, key=alone.__getitem__)[: plan.undecided_windows])
    window = switch.model.config.linearization["mixers"][LONG]["window"]
    return WindowSelection(window, without, alone, chosen, kl(chosen))


def with_long_windows(switch: Switch) -> dict[int, LinearizedAttention]:
    """A linearized attention with the longer window for each layer of `switch`, with its calibrated parameters and the
    base's projections."""
    config, made = copy.deepcopy(switch.model.config), {}
    for i in switch.choices:
        config.linearization["layers"][i] = LONG
        calibrated = switch.linear[i].mixer
        made[i] = LinearizedAttention(switch.attentions[i], config, i).eval()
        made[i].mixer.load_state_dict(calibrated.state_dict(), assign=True)
    return made


def _measured(
    switch: Switch,
    long: dict[int, LinearizedAttention],
    layers: Collection[int],
    softmax: Collection[int],
    measure: Measure,
) -> float:
    kept = switch.linear
    switch.linear = [long[i] if i in layers else attention for i, attention in enumerate(kept)]
    try:
        return measure(softmax).score
    finally:
        switch.linear = kept
