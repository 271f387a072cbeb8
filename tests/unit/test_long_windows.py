"""Some linear layers may have a longer window: which ones a recipe may name, and how a run chooses them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cramped import cramped
from folders import shared_folder
from rich.console import Console
from tiny import save_tiny_base, tiny_config, tiny_tokenizer

from liger_convert.config.recipe import Recipe, build
from liger_convert.data.documents import Document
from liger_convert.io.checkpoint import load_config
from liger_convert.model.loading import linearize_base
from liger_convert.pipeline import layer_selection, single_steps, window_selection
from liger_convert.pipeline.layer_selection import make_switch
from liger_convert.pipeline.plan import Plan, make_plan
from liger_convert.pipeline.plan_tables import render
from liger_convert.utils.errors import BadInput

L, N, LONG = "main", "softmax", "long"
CPU = torch.device("cpu")
IDS = np.random.default_rng(0).integers(3, 101, 900, dtype=np.int32)
TEXT = [Document(ids, np.ones(len(ids), bool), len(ids)) for ids in (IDS[:500], IDS[500:])]


def recipe(layers: Any, mixer: str = "gla", **fields: Any) -> Recipe:
    given = {"mixer": {"type": mixer, "window": 8, "sinks": 2}, "layers": layers, "precision": "float32"}
    given |= {"data": {"text": {"source": "pydoc"}}}
    return build({"version": 1, "name": "tiny", "base": "b", **given, **fields}, "recipe")


def long(layers: Any, window: int = 20, **choice: Any) -> dict[str, Any]:
    return choice | {"long_windows": {"layers": layers, "window": window}}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (long([3], softmax=[1]), [L, N, L, LONG, L]),
        (long([], softmax=[1]), [L, N, L, L, L]),
        (long(2, softmax=[0]), [N, LONG, LONG, L, L]),
        (long(0.5, softmax=[0]), [N, LONG, LONG, L, L]),
        (long(0.2, softmax=[0]), [N, L, L, L, L]),  # rounded down
        (long(1, softmax_auto=2), [LONG, L, L, N, N]),
        (long([1, 4], softmax_auto=2), [L, LONG, N, N, LONG]),  # layers that are named stay linear
        (long([0, 2], softmax_every=2), [LONG, N, LONG, N, L]),
        (long([1], linear=[1, 2]), [N, LONG, L, N, N]),
    ],
)
def test_layers_with_a_longer_window_are_linear_layers(layers: Any, expected: list[str]) -> None:
    assert recipe(layers).layer_names(5) == expected


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (long([1], softmax=[1]), "layers.long_windows.layers: layer 1 stays softmax; name linear layers"),
        (long([7], softmax=[1]), "layers.long_windows.layers: layer 7 does not exist"),
        (long([2, 2], softmax=[1]), "layers.long_windows.layers: layer 2 is named twice"),
        (long([0, 2, 3, 4], softmax=[1]), "would be all 4 linear layers; set mixer.window instead"),
        (long(4, softmax_auto=1), "would be all 4 linear layers; set mixer.window instead"),
        (long([0, 2, 3, 4], softmax_auto=1), "would be all 4 linear layers; set mixer.window instead"),
        (long([1, 2], softmax_auto=4), "layers.softmax_auto: 4 is too many; layers.long_windows.layers leaves 3"),
    ],
)
def test_layers_that_cannot_have_it_are_refused(layers: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says.replace(".", r"\.")):
        recipe(layers).layer_names(5)


@pytest.mark.parametrize(
    ("layers", "fields", "says"),
    [
        (long([1], repeat=[L, N]), {}, "layers.long_windows: `repeat` names the mixer of every layer"),
        (long(1.5, softmax=[1]), {}, "layers.long_windows.layers: should be a whole number of layers above 0"),
        (long(1, softmax=[1]), {"data": {}}, "layers.long_windows.layers: the layers are chosen on text that exists"),
        (long([1], softmax=[0]), {"mixers": {LONG: {"type": "gla"}}}, "mixers.long: this name is that of the layers"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(layers: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says.replace(".", r"\.")):
        recipe(layers, **fields)


@pytest.mark.parametrize("window", [8, 5])
def test_a_longer_window_that_is_not_longer_is_refused(window: int) -> None:
    says = rf"layers\.long_windows\.window: {window} is not longer than the window of 8 in mixer\.window"
    with pytest.raises(BadInput, match=says):
        make_plan(recipe(long([1], window, softmax=[0])), tiny_config("llama"))


def test_the_plan_has_the_window_and_its_state_in_these_layers_alone() -> None:
    without = make_plan(recipe({"softmax": [0]}), tiny_config("llama"))
    made = make_plan(recipe(long([2], softmax=[0])), tiny_config("llama"))
    mixers = made.linearization["mixers"]
    assert mixers[LONG] == mixers[L] | {"window": 20}
    assert made.layers == [N, L, LONG]
    ring = 12 * (made.token_bytes * 3 // 2 + 8)  # 12 tokens more: keys, values, keys before rotary, positions
    assert made.state_bytes - without.state_bytes == ring


def test_the_plan_says_what_the_run_has_yet_to_choose() -> None:
    config = tiny_config("llama", num_hidden_layers=6)
    for layers, said in (
        (long(1, softmax_auto=2), {"softmax_auto": 2, "long_windows": 1}),
        (long(1, softmax=[0]), {"softmax": [0], "long_windows": 1}),
        (long([2], softmax_auto=1), {"softmax_auto": 1, "long_windows": [2]}),
    ):
        made = make_plan(recipe(layers), config)
        assert made.to_dict()["linearization"]["layers"] == said
        console = Console(width=160, file=io.StringIO(), record=True)
        console.print(render(made))
        assert "1 of 6, chosen by measurement in the run" in console.export_text()


@pytest.mark.parametrize(("context", "windows"), [(64, (8, 16)), (80, (8, 16)), (512, (8, 20)), (32, (4, 8))])
def test_a_longer_window_is_a_quarter_of_the_context_at_most(context: int, windows: tuple[int, int]) -> None:
    written = recipe(long([1], softmax=[0]), adapt={"hidden_size": 32})
    made = make_plan(written, tiny_config("llama", max_position_embeddings=context))
    assert tuple(made.linearization["mixers"][name]["window"] for name in (L, LONG)) == windows
    said = f"layers.long_windows.window: {windows[1]} in place of 20, because the base was made for {context} tokens"
    assert (said in made.adapted) == (windows[1] < 20)


def test_on_a_base_of_a_tiny_context_adapt_leaves_them_out() -> None:
    written = recipe(long(1, softmax=[0]), adapt={"hidden_size": 32})
    made = make_plan(written, tiny_config("llama", max_position_embeddings=7))
    assert made.layers == [N, L, L]
    assert made.undecided_windows == 0
    said = "layers.long_windows: left out, because 1 is not longer than the window of 1 in mixer.window"
    assert said in made.adapted


# --- the choice


@pytest.fixture(scope="module")
def base() -> Path:
    folder = shared_folder("tiny-llama")
    return save_tiny_base("llama", folder, tokenizer=False, num_hidden_layers=4)


def chosen(base: Path, monkeypatch: pytest.MonkeyPatch, layers: Any, mixer: str = "gla") -> single_steps.Chosen:
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    written = recipe(layers, mixer)
    plan = make_plan(written, load_config(base))
    return single_steps.choose_layers(written, plan, TEXT, base, tiny_tokenizer(), CPU)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mixer", ["gla", "liger-paper"])
def test_a_layer_with_the_longer_window_is_measured_as_a_conversion_would_have_it(
    base: Path, monkeypatch: pytest.MonkeyPatch, mixer: str, named: bool
) -> None:
    """Its logits are those of a model that is made with this plan and has the same calibrated memories."""
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    written = recipe(long([2] if named else 1, softmax=[0]), mixer)
    plan: Plan = make_plan(written, load_config(base))
    switch = make_switch(written, plan, base, TEXT, CPU)
    if not named:
        switch.linear[2] = window_selection.with_long_windows(switch)[2]
    made = linearize_base(base, switch.model.config.linearization | {"layers": [N, L, LONG, L]}).eval()
    calibrated = {name: p for name, p in switch.model.state_dict().items() if ".mixer." in name}
    missing = made.load_state_dict({n: p for n, p in calibrated.items() if n in made.state_dict()}, strict=False)
    assert not missing.unexpected_keys
    ids_NT = torch.as_tensor(IDS[:120], dtype=torch.long)[None]
    with torch.no_grad():
        found, expected = (m(ids_NT, use_cache=False).logits for m in (switch.set_softmax([0]), made))
        shorter = linearize_base(base, switch.model.config.linearization | {"layers": [N, L, L, L]}).eval()
        shorter.load_state_dict(calibrated, strict=False)
        assert torch.equal(found, expected)
        assert not torch.equal(shorter(ids_NT, use_cache=False).logits, expected)


def test_the_layers_with_the_lowest_divergence_are_chosen_after_the_softmax_layers(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = chosen(base, monkeypatch, long(2, softmax_auto=1, select="kl"))
    (kept,) = found.softmax_layers
    assert found.windows is not None
    alone = found.windows.alone
    assert set(alone) == set(range(4)) - {kept}
    assert found.long_layers == sorted(sorted(alone, key=alone.__getitem__)[:2])
    assert found.windows.together < found.windows.without
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert written["softmax_layers"] == [kept]
    assert written["long_windows"] == found.long_layers
    assert recipe(long(2, softmax_auto=1)).with_layers([kept], found.long_layers).layer_names(4) == [
        N if i == kept else LONG if i in found.long_layers else L for i in range(4)
    ]


@pytest.mark.parametrize("select", ["copy", "kl", "gates"])
def test_layers_that_a_recipe_names_keep_it_while_the_softmax_layers_are_chosen(
    base: Path, monkeypatch: pytest.MonkeyPatch, select: str
) -> None:
    """Without names, one of these layers would stay softmax. The losses of the base are those of the base."""
    free = chosen(base, monkeypatch, {"softmax_auto": 2, "select": select, "select_tokens": 600})
    named = free.softmax_layers
    layers = long(named, softmax_auto=1, select=select, select_tokens=600)
    found = chosen(base, monkeypatch, layers)
    assert found.long_layers == named
    assert set(found.softmax_layers).isdisjoint(named)
    assert found.softmax is not None
    assert free.softmax is not None
    assert found.softmax.base == free.softmax.base
    assert found.softmax.linear != free.softmax.linear  # with the longer window in the named layers
    made = recipe(layers).with_layers(found.softmax_layers, []).layer_names(4)
    assert made == [LONG if i in named else N if i in found.softmax_layers else L for i in range(4)]


@pytest.mark.parametrize("mixer", ["gla", "gated-deltanet"])
def test_models_that_a_gpu_cannot_hold_give_the_same_choice(
    base: Path, monkeypatch: pytest.MonkeyPatch, mixer: str
) -> None:
    expected = chosen(base, monkeypatch, long(1, softmax=[1]), mixer)
    waiting = cramped(monkeypatch, 0.8)
    assert chosen(base, monkeypatch, long(1, softmax=[1]), mixer).windows == expected.windows
    assert all(any(".self_attn." in name for name in of_model) for of_model in waiting)


def test_softmax_layers_are_chosen_on_copies_alone_and_longer_windows_on_plain_text_too(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    made = layer_selection.rows_with_copies

    def rows(documents: Any, length: int, tokens: int, seed: int, copies: float) -> Any:
        asked.append(copies)
        return made(documents, length, tokens, seed, copies)

    monkeypatch.setattr(layer_selection, "rows_with_copies", rows)
    chosen(base, monkeypatch, long(1, softmax_auto=1, select="kl"))
    assert asked == [1.0, 0.3]


def test_softmax_layers_that_a_recipe_names_are_kept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(base, monkeypatch, long(1, softmax=[1]))
    assert found.to_dict()["softmax_layers"] == [1]
    assert len(found.long_layers) == 1


def test_where_a_fraction_of_the_layers_is_none_nothing_is_loaded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(single_steps, "make_switch", lambda *args, **options: loaded.append(args))
    found = chosen(base, monkeypatch, long(0.2, softmax=[0]))  # 0.2 of three layers
    assert found.to_dict() == {"softmax_layers": [0]}
    assert not loaded


def test_a_divergence_that_is_not_finite_is_null() -> None:
    found = window_selection.WindowSelection(20, 1.0, {0: float("inf"), 1: 0.5}, [1], 0.5)
    assert found.to_dict()["window_kl"]["alone"] == {"0": None, "1": 0.5}
