"""Layer selection switches exactly between both attentions of a layer. The search finds layers that help together."""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cramped import cramped
from folders import shared_folder
from pairs import quick_pairs
from rich.console import Console
from tiny import save_tiny_base, tiny_tokenizer
from transformers import AutoModelForCausalLM

from liger_convert.config.recipe import build
from liger_convert.data.documents import Document
from liger_convert.eval import measures
from liger_convert.eval.measures import copy_loss
from liger_convert.eval.suites import CopyMeasure
from liger_convert.io.checkpoint import load_config
from liger_convert.mixers import resolve_spec
from liger_convert.model import placing
from liger_convert.model.loading import linearize_base
from liger_convert.pipeline import layer_selection
from liger_convert.pipeline.layer_selection import CopyLosses, LayerSelection, Switch, evaluations, search
from liger_convert.pipeline.plan import make_plan
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report

pytestmark = pytest.mark.usefixtures("_little_to_calibrate_on")
CPU = torch.device("cpu")
TOKENS = torch.randint(3, 101, (2, 29), generator=torch.Generator().manual_seed(0))
IDS = np.random.default_rng(0).integers(3, 101, 900, dtype=np.int32)
TEXT = [Document(ids, np.ones(len(ids), bool), len(ids)) for ids in (IDS[:500], IDS[500:])]


@pytest.fixture
def _little_to_calibrate_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)


@functools.cache
def base_folder(family: str) -> Path:
    return save_tiny_base(family, shared_folder(f"tiny-{family}"), tokenizer=False)


def linearized(family: str, layers: str, mixer: str) -> Any:
    names = [{"L": "main", "N": "softmax"}[letter] for letter in layers]
    spec = resolve_spec({"type": mixer, "window": 5, "sinks": 2})
    return linearize_base(base_folder(family), {"format": 2, "mixers": {"main": spec}, "layers": names}).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def selected(
    keep: int = 1,
    text: list[Document] = TEXT,
    report: Report | None = None,
    mixer: str = "gla",
    folder: Path | None = None,
    select: str = "copy",
) -> LayerSelection:
    spec = {"type": mixer, "window": 8, "sinks": 2}
    fields: dict[str, Any] = {"version": 1, "name": "tiny", "base": "b", "mixer": spec}
    fields |= {
        "layers": {"softmax_auto": keep, "select": select},
        "data": {"text": {"source": "pydoc"}},
        "precision": "float32",
    }
    recipe, folder = build(fields, "recipe"), folder or base_folder("llama")
    plan = make_plan(recipe, load_config(folder))
    switch = layer_selection.make_switch(recipe, plan, folder, text, CPU)
    report = report or (lambda done, total, note="": None)
    return layer_selection.select_layers(recipe, plan, switch, tiny_tokenizer(), text, report)


def searched(
    keep: int, copy: Callable[[Collection[int]], float], text: Callable = lambda kept: 0.0, exchange: bool = False
) -> LayerSelection:
    return search(range(8), keep, lambda kept: CopyLosses(copy(kept), text(kept)), exchange)


# --- the switch


@pytest.mark.parametrize(("family", "mixer"), quick_pairs("the switch"))
def test_the_switched_model_is_the_base_or_the_model_with_that_plan(family: str, mixer: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder(family)).eval()
    expected = {"NNN": logits(base), **{layers: logits(linearized(family, layers, mixer)) for layers in ("LLL", "LNL")}}
    switch = Switch(base, linearized(family, "LLL", mixer), CPU)
    for layers in ("LNL", "NNN", "LLL", "NNN"):
        kept = [i for i, letter in enumerate(layers) if letter == "N"]
        assert torch.equal(logits(switch.set_softmax(kept)), expected[layers]), layers


# --- the search


def test_of_layers_that_back_each_other_up_one_is_kept_and_not_both() -> None:
    found = searched(2, lambda kept: 3 - 2 * bool({3, 4} & set(kept)) - 0.5 * (6 in kept))
    assert found.swapped[3] == found.swapped[4] == found.base  # in the base neither is missed
    assert [layer for layer, _ in found.path] == [3, 6]
    assert [losses.copy_nll for _, losses in found.path] == [1, 0.5]


def test_layers_that_help_only_together_are_found() -> None:
    found = searched(2, lambda kept: 3 - 0.2 * (2 in kept) - 0.1 * (7 in kept) - 2 * ({2, 5} <= set(kept)))
    assert found.restored[5] == found.linear  # alone it gives nothing
    assert found.softmax_layers == [2, 5]


def test_of_layers_that_help_most_at_first_one_is_exchanged_if_another_helps_more_in_the_end() -> None:
    """As on SmolLM2-135M: after layer 18 layer 20 helps most, but beside 7 and 18 layer 23 does."""
    alone, together = {2: 1.0, 4: 0.5, 6: 0.4, 1: 0.1}, {frozenset({2, 1, 6}): 0.8}

    def copy(kept: Collection[int]) -> float:
        return 3 - sum(alone.get(i, 0) for i in kept) - together.get(frozenset(kept), 0)

    assert searched(3, copy).softmax_layers == [2, 4, 6]
    found = searched(3, copy, exchange=True)
    assert found.softmax_layers == [1, 2, 6]
    assert [layer for layer, _ in found.path] == [2, 6, 1]
    assert found.path[-1][1].score == pytest.approx(0.7)


def test_text_decides_between_layers_that_recall_alike() -> None:
    assert searched(1, lambda kept: 3 - len(kept), lambda kept: 2 - 0.1 * (5 in kept)).softmax_layers == [5]


def test_a_set_of_layers_that_diverges_is_the_worst() -> None:
    found = searched(2, lambda kept: math.inf if 0 in kept else 3 - len(kept))
    assert found.softmax_layers == [1, 2]
    assert found.to_dict()["layers"][0]["restored"]["copy_nll"] is None
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 3, 5, 7])
def test_every_layer_is_measured_both_ways_and_the_cost_is_foreseen(keep: int, exchange: bool) -> None:
    asked: list[Collection[int]] = []
    found = searched(keep, lambda kept: asked.append(kept) or float(8 - len(kept)), exchange=exchange)
    assert len(asked) == evaluations(8, keep, exchange)
    assert {frozenset({i}) for i in range(8)} | {frozenset(range(8)) - {i} for i in range(8)} <= set(asked)
    assert found.softmax_layers == list(range(keep))  # ties go to the lower layer


# --- the selection


@pytest.mark.parametrize(("select", "mixer"), [("copy", "gla"), ("kl", "gla"), ("kl", "gated-deltanet")])
def test_a_selection_of_models_that_a_gpu_cannot_hold_is_the_same(
    select: str, mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of both models stay in host memory, but no mixer does, as mixers are calibrated in place."""
    expected = selected(2, select=select, mixer=mixer)
    waiting = cramped(monkeypatch, 0.8)
    assert selected(2, select=select, mixer=mixer) == expected
    base, model = waiting
    assert any(".self_attn." in name for name in base)
    assert any(".self_attn." in name for name in model)
    assert any(".mlp." in name for name in model)
    assert not any(".mixer." in name for name in model)


def test_a_mixer_that_waited_would_not_be_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    cramped(monkeypatch, 0.8)
    monkeypatch.setattr(placing, "_apart", lambda name, module, device: {name: placing.HOST})
    with pytest.raises(RuntimeError, match="device meta"):
        selected(2, select="kl")


def test_models_that_a_gpu_holds_are_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = cramped(monkeypatch, 1.2)
    selected()
    assert waiting == [set(), set()]


def test_a_selection_is_made_of_the_losses_it_names_and_comes_out_the_same_twice() -> None:
    told: list[tuple[float, float | None]] = []
    found = selected(2, report=lambda done, total, note="": told.append((done, total)))
    assert found == selected(2)
    base = AutoModelForCausalLM.from_pretrained(base_folder("llama")).eval()
    options: dict[str, Any] = {"batch_size": 4, "dtype": torch.float32, "report": lambda done, total, note="": None}
    copied = copy_loss(base, tiny_tokenizer(), TEXT, CopyMeasure(length=128, draws=8), **options)
    assert found.base.copy_nll == pytest.approx(copied["copy_nll_128"]["value"], rel=1e-6)
    assert len({found.base, found.linear, *found.swapped.values(), *found.restored.values()}) == 8
    (left,) = {0, 1, 2} - set(found.softmax_layers)
    assert found.path[1][1] == found.swapped[left]  # two of three layers kept is one of three linear
    assert told[-1] == (evaluations(3, 2, exchange=True), evaluations(3, 2, exchange=True))


def test_by_kl_the_base_is_at_zero_and_each_layer_that_is_restored_brings_the_model_nearer() -> None:
    found = selected(2, select="kl")
    assert found == selected(2, select="kl")
    assert found.base.score == pytest.approx(0, abs=1e-6)
    assert 0 < found.path[1][1].score < found.path[0][1].score < found.linear.score
    assert list(found.to_dict()["base"]) == ["kl"]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(found.render())
    assert "softmax alone: kl" in console.export_text()


def test_rows_that_kl_is_measured_on_leave_a_window_as_long_as_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the window every layer is the base's, so all choices would look alike."""
    monkeypatch.setattr(layer_selection, "KL_LENGTH", 8)
    found = selected(1, select="kl")
    assert min(losses.score for losses in found.restored.values()) > 1e-3


@pytest.mark.parametrize(("rows", "copied"), [(1, 1), (2, 1), (16, 5)])
def test_equally_many_of_the_rows_for_kl_have_a_copy_with_every_seed(rows: int, copied: int) -> None:
    ids = np.arange(4096, dtype=np.int32)  # no token twice, unless it is copied
    text = [Document(part, np.ones(256, bool), 256) for part in np.split(ids, 16)]
    for seed in range(12):
        made = [row["input_ids"] for row in layer_selection.rows_with_copies(text, 64, 64 * rows, seed, 0.3)]
        assert [len(row) for row in made] == [64] * rows
        assert sum(len(row.unique()) < 64 for row in made) == copied
        plain = torch.cat([row for row in made if len(row.unique()) == 64] or [torch.empty(0)])
        assert len(plain.unique()) == len(plain) == 64 * (rows - copied)


@pytest.mark.parametrize(("select", "sizes"), [("kl", "KL_ROWS"), ("copy", "BATCH")])
def test_rows_that_are_measured_together_give_the_losses_of_rows_measured_alone(
    select: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(getattr(layer_selection, sizes), "cpu", 1)
    alone = selected(1, select=select)
    monkeypatch.setitem(getattr(layer_selection, sizes), "cpu", 3)  # the last batch is not full
    together = selected(1, select=select)
    assert alone.linear.score > 0.01
    for name in ("swapped", "restored"):
        for layer, losses in getattr(alone, name).items():
            assert getattr(together, name)[layer].score == pytest.approx(losses.score, rel=1e-4)


def test_layers_with_a_window_of_the_bases_own_are_not_chosen_from(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    folder = save_tiny_base("gemma2", tmp_path, tokenizer=False, num_hidden_layers=4, layer_types=kinds)
    told: list[tuple[float, float | None]] = []
    found = selected(2, report=lambda done, total, note="": told.append((done, total)), folder=folder)
    assert list(found.swapped) == list(found.restored) == [0, 2, 3]
    assert 1 not in found.softmax_layers
    assert len(found.softmax_layers) == 2
    assert told[-1] == (evaluations(3, 2, exchange=True), evaluations(3, 2, exchange=True))
    (left,) = {0, 2, 3} - set(found.softmax_layers)
    assert found.path[1][1] == found.swapped[left]


def test_a_mixer_that_cannot_be_calibrated_is_measured_by_its_window() -> None:
    assert selected(mixer="liger-paper") == selected(mixer="window") != selected()


def test_a_selection_shows_every_layer_and_every_choice() -> None:
    found = selected(2)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(found.render())
    text = console.export_text()
    assert all(f"│ {i} " in text for i in range(3))
    assert all(f"+ {layer}" in text and f" {place}. " in text for place, (layer, _) in enumerate(found.path, 1))
    assert list(found.to_dict()) == ["softmax_layers", "base", "linear", "layers", "path"]


@pytest.mark.parametrize(("length", "draws"), [(128, 8), (512, 8), (1024, 4), (2048, 2), (8192, 2)])
def test_a_cpu_copies_fewer_texts_if_they_are_long(length: int, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[CopyMeasure] = []
    monkeypatch.setattr(measures, "repetitions", lambda tokenizer, documents, measure: asked.append(measure))
    for device, expected in ((CPU, draws), (torch.device("cuda"), 32)):
        layer_selection.copying(SimpleNamespace(device=device), None, TEXT, length, torch.float32)
        assert (asked[-1].length, asked[-1].draws) == (length, expected)


def test_too_little_text_to_measure_on_is_refused() -> None:
    with pytest.raises(BadInput, match=r"data\.text: 200 training tokens are too few for the two spans of 128"):
        selected(text=[Document(IDS[:200], np.ones(200, bool), 200)])
