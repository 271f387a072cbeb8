"""Selects the layers that stay softmax by measurement: how much each layer helps when the others are linear.

A set of softmax layers is measured on texts that are repeated once, [x, x]. The loss on the first half is its quality,
the loss on the second half its recall. Alternatively it is measured by its KL divergence from the base on rows of text
in which a stretch is repeated. Mixers are calibrated but not trained, and those whose `combine` is not `shared` are
reduced to their window. So a selection takes minutes and needs no training.

If layers can stand in for each other, each one looks worthless when it alone is removed from the base. So the search
starts from a model without softmax layers and restores the layer that helps most, then the one that helps most in
addition, and so on (as in KL-LS, 2512.20569, which also trains each restored model). By copying, chosen layers are then
exchanged for others as long as that lowers the losses: a layer that helps most early on can be in the way later. By KL
they are not, because sets that differ by one layer are then ordered differently than after training (eval/LOG.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

from liger_convert.config.names import LONG, MAIN
from liger_convert.config.recipe import Recipe
from liger_convert.data.documents import Document
from liger_convert.data.packed_rows import collate, pack
from liger_convert.eval import measures
from liger_convert.eval.ablation import window_control
from liger_convert.eval.generation import weight_dtype
from liger_convert.eval.suites import CopyMeasure
from liger_convert.mixers import SOFTMAX
from liger_convert.model import linear_layers
from liger_convert.model.bases import context_length
from liger_convert.model.loading import linearize_base, load_pretrained
from liger_convert.model.placing import move, place_both
from liger_convert.pipeline.plan import Plan
from liger_convert.training.calibrate import calibrate
from liger_convert.training.losses import kl_divergence, next_tokens
from liger_convert.training.stage import CALIBRATION_TOKENS
from liger_convert.utils.device import autocast, compute_dtype
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report

# How many texts are repeated for `copy`, and the batch size at which they are measured, in rows of `measures.ROW`
# tokens. A CPU takes fewer texts if they are long, but at least two. On a GPU, smaller batches would be bound by kernel
# launches.
DRAWS = {"cuda": 32, "cpu": 8}
CPU_TOKENS = 4096
BATCH = {"cuda": 16, "cpu": 4}
LENGTH = 128  # least number of tokens of x; also at least two windows, so that the first half has left the window

# The rows on which `kl` is measured. A CPU measures as many tokens as for `copy`.
KL_LENGTH = 1024  # or two windows if they are longer; at most the base's context
KL_TOKENS = {"cuda": 16384, "cpu": 2048}
# Fraction of these rows in which a stretch is repeated. Softmax layers are there to recall, so it is all of them: on
# plain text, sets of layers hardly differ, and by chance one that recalls worse came out ahead (eval/LOG.md).
KL_COPIES = 1.0
KL_ROWS = {"cuda": 4, "cpu": 1}  # at a time; on a GPU, a single row would be bound by kernel launches


@dataclass(frozen=True)
class Losses:
    """The losses by which a set of softmax layers is measured, in nats per token."""

    @property
    def score(self) -> float:
        """The sum of the losses. For `CopyLosses`, a window costs several nats of recall and a few tenths of a nat of
        text. So recall decides, and text decides between layers with similar recall. A ratio of the two would have
        near-zero denominators."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class CopyLosses(Losses):
    """`copy_nll` on the second copy of a repeated text, `text_nll` on the first."""

    copy_nll: float
    text_nll: float


@dataclass(frozen=True)
class Divergence(Losses):
    """`kl`: KL(base || model) on packed rows, some with a copy."""

    kl: float


Measure = Callable[[Collection[int]], Losses]


@dataclass(frozen=True)
class LayerSelection:
    """The result of a selection.

    base, linear: losses with all layers softmax, and with none.
    swapped, restored: for every layer to choose from, losses with only this layer linear, and with only it softmax.
    path: the softmax layers, each the one that helps most in addition to those before it, with the losses reached.
    """

    base: Losses
    linear: Losses
    swapped: dict[int, Losses]
    restored: dict[int, Losses]
    path: list[tuple[int, Losses]]

    @property
    def softmax_layers(self) -> list[int]:
        return sorted(layer for layer, _ in self.path)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON. A loss that is not finite is null."""
        return {
            "softmax_layers": self.softmax_layers,
            "base": _json(self.base),
            "linear": _json(self.linear),
            "layers": [
                {"layer": i, "swapped": _json(self.swapped[i]), "restored": _json(self.restored[i])}
                for i in self.swapped
            ],
            "path": [{"layer": layer, **_json(losses)} for layer, losses in self.path],
        }

    def render(self) -> Group:
        """Two tables for a terminal: every layer alone, and the softmax layers in the order of `path`."""
        first, *others = [field.name for field in fields(self.base)]
        layers = Table("layer", f"linear alone: {first}", *others, f"softmax alone: {first}", *others, "chosen")
        order = {layer: f"{place}." for place, (layer, _) in enumerate(self.path, 1)}
        for i in self.swapped:
            layers.add_row(str(i), *_cells(self.swapped[i]), *_cells(self.restored[i]), order.get(i, ""))
        path = Table("softmax layers", first, *others)
        path.add_row("none", *_cells(self.linear))
        for layer, losses in self.path:
            path.add_row(f"+ {layer}", *_cells(losses))
        path.add_row("all: the base", *_cells(self.base))
        for table in (layers, path):
            for column in table.columns[1:]:
                column.justify = "right"
        return Group(layers, path)


class Switch:
    """A model with both attentions of every layer that is linear in `model`; the softmax ones come from `base`.

    device: where they compute. layers: those with both attentions. choices: the ones to choose from, which are all but
    those with the longer window of `layers.long_windows`.
    """

    def __init__(self, base: Any, model: Any, device: torch.device):
        self.model, self.device = model, device
        self.attentions = [layer.self_attn for layer in base.model.layers]
        self.linear = [layer.self_attn for layer in model.model.layers]
        self.names: list[str] = list(model.config.linearization["layers"])
        self.layers = linear_layers(model.config)
        self.choices = [i for i in self.layers if self.names[i] != LONG]

    def set_softmax(self, softmax: Collection[int]) -> Any:
        """Switches these layers to softmax, and all others with both attentions to linear. Returns the model, which is
        then as a conversion with this plan would make it."""
        for i in self.layers:
            layer = self.model.model.layers[i]
            layer.self_attn = self.attentions[i] if i in softmax else self.linear[i]
            self.model.config.linearization["layers"][i] = SOFTMAX if i in softmax else self.names[i]
        return self.model

    def set_base(self) -> Any:
        """Switches all layers to softmax. Returns the model, which is then the base."""
        return self.set_softmax(self.layers)


def select_layers(
    recipe: Recipe, plan: Plan, switch: Switch, tokenizer: Any, documents: Sequence[Document], report: Report
) -> LayerSelection:
    """Chooses the softmax layers that `plan` leaves undecided, between the attentions of `switch`, on text of
    `documents`."""
    count, length = plan.undecided, span(plan)
    dtype = compute_dtype(switch.device, recipe.precision)
    exchange = plan.selected_by == "copy"
    if exchange:
        measure = copying(switch, tokenizer, documents, length, dtype)
    else:
        measure = divergence(switch, documents, length, dtype, recipe.seed, KL_COPIES)
    total, done = evaluations(len(switch.choices), count, exchange), 0

    def counted(softmax: Collection[int]) -> Losses:
        nonlocal done
        losses = measure(softmax)
        done += 1
        report(done, max(done, total))
        return losses

    named = [i for i in switch.layers if i not in switch.choices]
    return search(switch.choices, count, counted, exchange, named)


def span(plan: Plan) -> int:
    """The number of tokens of a text that is repeated."""
    window: int = plan.linearization["mixers"][MAIN]["window"]
    return max(LENGTH, 2 * window)


def copying(switch: Switch, tokenizer: Any, documents: Sequence[Document], length: int, dtype: torch.dtype) -> Measure:
    """Measures by the loss on texts of `length` tokens that are repeated once."""
    kind = switch.device.type
    draws, batch_size = (sizes.get(kind, sizes["cuda"]) for sizes in (DRAWS, BATCH))
    if kind == "cpu":
        draws = max(2, min(draws, CPU_TOKENS // length))
    ids_NT = measures.repetitions(tokenizer, documents, CopyMeasure(length=length, draws=draws))

    def measure(softmax: Collection[int]) -> CopyLosses:
        losses_NT = measures.window_losses(switch.set_softmax(softmax), ids_NT, batch_size, dtype).double()
        # the first token of the second half belongs to neither, because nothing announces that x starts again
        return CopyLosses(_finite(losses_NT[:, 1 - length :]), _finite(losses_NT[:, :-length]))

    return measure


def make_switch(
    recipe: Recipe,
    plan: Plan,
    base_dir: Path,
    documents: Sequence[Document],
    device: torch.device,
    *,
    trains: bool = False,
) -> Switch:
    """A switch between both attentions of every layer without a sliding window of its own: that of the base in
    `base_dir`, and the mixer, calibrated to it on text of `documents`. Layers that the recipe names for a longer window
    have it.

    If a GPU has no room for both models, layers are offloaded to the host's memory (see `place`). With `trains` they
    are not, because a backward pass needs all weights at once. Raises BadInput when the documents do not hold two texts
    to measure on.
    """
    mixer, length = plan.linearization["mixers"][MAIN], span(plan)
    if (tokens := sum(len(document.ids) for document in documents)) < 2 * length:
        what = f"{tokens} training tokens are too few for the two spans of {length} on which layers are measured"
        raise BadInput(f"data.{recipe.given_texts[0]}: {what}; give more text")
    dtype = compute_dtype(device, recipe.precision)
    sliding, named = plan.sliding, plan.named_windows
    layers = [SOFTMAX if i in sliding else LONG if i in named else MAIN for i in range(len(plan.layers))]
    linearization = plan.linearization | {"layers": layers}
    # a memory that does not share the denominator recalls nothing before it is trained, and could hide all differences
    if mixer["combine"] != "shared":
        linearization = window_control(linearization)
    weights = weight_dtype(device, recipe.precision)
    base = load_pretrained(base_dir, dtype=weights)
    model = linearize_base(base_dir, linearization, recipe.seed, dtype=weights)
    base, model = (move(base, device), move(model, device)) if trains else place_both(base, model, device)
    rows = pack(documents, 2 * length, max(CALIBRATION_TOKENS, 2 * length), recipe.seed)
    batch = collate([rows[i] for i in range(len(rows))])
    with autocast(device, dtype):
        calibrate(model, base, batch["input_ids"].to(device), batch["position_ids"].to(device))
    return Switch(base, model, device)


def divergence(
    switch: Switch, documents: Sequence[Document], length: int, dtype: torch.dtype, seed: int, copies: float
) -> Measure:
    """Measures by KL(base || model) on rows of `documents` with at least `length` tokens, if the context has as many. A
    fraction of them, `copies`, has a copy. The base's logits are kept on the device in `dtype`."""
    model, device = switch.model, switch.device
    length = max(KL_LENGTH, length)
    length = min(length, context_length(model.config) or length)
    tokens = max(KL_TOKENS.get(device.type, KL_TOKENS["cuda"]), length)
    data = rows_with_copies(documents, length, tokens, seed, copies)
    size = KL_ROWS.get(device.type, KL_ROWS["cuda"])
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    batches = [{name: x_BT.to(device) for name, x_BT in collate(part).items()} for part in parts]

    def logits(batch: dict[str, Tensor]) -> Tensor:
        logits_BTV: Tensor = model(batch["input_ids"], use_cache=False).logits
        return logits_BTV.flatten(0, 1)

    def measure(softmax: Collection[int]) -> Divergence:
        switch.set_softmax(softmax)
        with torch.inference_mode(), autocast(device, dtype):
            sums = [_kl(logits(batch), of_base, next_tokens(batch["labels"])) for batch, of_base in zip(batches, base)]
        return Divergence(_finite(torch.stack(sums).double().sum() / (len(data) * (length - 1))))

    switch.set_base()
    with torch.inference_mode(), autocast(device, dtype):
        base = [logits(batch).to(dtype) for batch in batches]
    return measure


def rows_with_copies(
    documents: Sequence[Document], length: int, tokens: int, seed: int, fraction: float
) -> list[dict[str, Tensor]]:
    """Rows of `length` tokens, as `pack` gives them. The same number of them has a copy with every seed: this fraction
    of them, but at least one.

    If each row had a copy by chance, as in training, that would decide the choice: the divergence of a model without
    softmax layers was .09 or .54 with 1 or 8 % of copied tokens in sixteen rows (eval/LOG.md).
    """
    text, copies = (pack(documents, length, tokens, seed, concat_documents=True, copy_fraction=x) for x in (0.0, 1.0))
    rows = len(text)
    count = max(1, round(fraction * rows))
    copied = {i * rows // count for i in range(count)}
    return [copies[i] if i in copied else text[i] for i in range(rows)]


def _kl(logits_NV: Tensor, base_NV: Tensor, next_N: Tensor) -> Tensor:
    """KL(base || model), summed over the tokens."""
    parts = zip(*(x.split(measures.LOGIT_ROWS) for x in (logits_NV, base_NV, next_N)))
    sums = [kl_divergence(logits_RV, base_RV, next_R, 1.0) for logits_RV, base_RV, next_R in parts]
    return torch.stack(sums).sum()


def search(
    layers: Sequence[int], count: int, measure: Measure, exchange: bool = False, named: Sequence[int] = ()
) -> LayerSelection:
    """Chooses `count` softmax layers among `layers`. `measure` returns the losses for a set of softmax layers. named:
    layers that the recipe makes linear, so that they are softmax in the base alone.

    Every layer is measured as the only softmax layer and as the only linear layer. The 2 `count` candidates are taken
    alternately from the layers that help most alone and from those that the base misses most, which may help only
    together with others. Each round adds the candidate with the best score. With `exchange`, each further round
    exchanges the chosen layer and the candidate that improve the score most, until none do. Ties go to the lower layer.
    """
    everything = frozenset((*layers, *named))
    base, linear = measure(everything), measure(frozenset())
    swapped = {i: measure(everything - {i}) for i in layers}
    restored = {i: measure(frozenset({i})) for i in layers}
    helpful = sorted(layers, key=lambda i: restored[i].score)
    missed = sorted(layers, key=lambda i: -swapped[i].score)
    candidates = list(dict.fromkeys(itertools.chain.from_iterable(zip(helpful, missed))))[: 2 * count]
    known = {frozenset({i}): losses for i, losses in restored.items()}

    def losses_of(chosen: frozenset[int]) -> Losses:
        if chosen not in known:
            known[chosen] = measure(chosen)
        return known[chosen]

    def greedy(among: Sequence[int]) -> list[tuple[int, Losses]]:
        path: list[tuple[int, Losses]] = []
        while len(path) < count:
            chosen = frozenset(layer for layer, _ in path)
            tried = [(layer, losses_of(chosen | {layer})) for layer in sorted(among) if layer not in chosen]
            path.append(min(tried, key=lambda choice: choice[1].score))
        return path

    path = greedy(candidates)
    improves = exchange
    while improves:
        chosen = frozenset(layer for layer, _ in path)
        others = sorted(set(candidates) - chosen)
        exchanged = [chosen - {left} | {entered} for left in sorted(chosen) for entered in others]
        best = min([chosen, *exchanged], key=lambda kept: losses_of(kept).score)
        improves = best != chosen
        if improves:
            path = greedy(sorted(best))
    return LayerSelection(base, linear, swapped, restored, path)


def evaluations(depth: int, count: int, exchange: bool) -> int:
    """How many times `search` measures; with `exchange`, if it finds nothing better. Exchanges of the last layer are
    known from its choice."""
    candidates = min(2 * count, depth)
    added = sum(candidates - chosen for chosen in range(1, count))
    return 2 + 2 * depth + added + exchange * (count - 1) * (candidates - count)


def finite_or_none(value: float) -> float | None:
    """`value` as JSON can hold it."""
    return value if math.isfinite(value) else None


def _finite(losses: torch.Tensor) -> float:
    mean = losses.mean().item()
    return mean if math.isfinite(mean) else math.inf  # so that a diverged model compares as the worst


def _json(losses: Losses) -> dict[str, float | None]:
    return {name: finite_or_none(value) for name, value in asdict(losses).items()}


def _cells(losses: Losses) -> tuple[str, ...]:
    return tuple(f"{value:.3f}" for value in asdict(losses).values())
