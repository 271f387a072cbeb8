"""Trained gates mix both attentions of every layer exactly, and find the layer that copying hangs on."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import shared_folder
from pairs import quick_pairs
from rich.console import Console
from tiny import save_tiny_base, tiny_tokenizer
from transformers import AutoModelForCausalLM

from liger_convert.config.recipe import build
from liger_convert.data.documents import Document
from liger_convert.io.checkpoint import load_config
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base
from liger_convert.pipeline import gate_selection, layer_selection, single_steps
from liger_convert.pipeline.gate_selection import GateSelection, largest
from liger_convert.pipeline.layer_selection import CopyLosses, Switch
from liger_convert.pipeline.plan import make_plan
from liger_convert.utils.errors import BadInput, LinearizeError

CPU = torch.device("cpu")
VOCAB = 1000  # so many that few tokens come twice in a text
IDS = np.random.default_rng(0).integers(3, VOCAB, 4000, dtype=np.int32)
TEXT = [Document(ids, np.ones(len(ids), bool), len(ids)) for ids in np.split(IDS, 4)]
COPIES, DEPTH = 2, 4  # the layer that copying hangs on, of so many


@functools.cache
def copier(layer: int = COPIES) -> Path:
    """A base that continues a text as it was continued before. Layer 0 gives every token the one before it, by position
    alone, so any window suffices. `layer` attends to the token after an earlier occurrence of the current one, at any
    distance, and predicts it. The other layers add noise."""
    torch.manual_seed(0)
    code, hidden = 32, 64  # the first half of a hidden state is the token's code, the second that of the one before
    folder = save_tiny_base(
        "llama",
        shared_folder("tiny-copier"),
        tokenizer=False,
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e9},
        initializer_range=0.02,
    )
    base = AutoModelForCausalLM.from_pretrained(folder)
    first, second = slice(0, code), slice(code, hidden)
    slow = [*range(5, 16), *range(21, 32)]  # dimensions of a head that rotary hardly turns within a text
    with torch.no_grad():
        codes = torch.randn(VOCAB, code).sign()
        base.model.embed_tokens.weight.zero_()[:, first] = codes
        base.lm_head.weight.zero_()[:, first] = 0.5 * codes
        for i, block in enumerate(base.model.layers):
            block.mlp.down_proj.weight.zero_()
            attention = block.self_attn
            if i in (0, layer):
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
                    projection.weight.zero_()
                attention.v_proj.weight[first, first] = torch.eye(code)
            if i == 0:
                angle = torch.tensor([1e9 ** (-2 * pair / 32) for pair in range(3)])
                attention.k_proj.bias[:3] = 12
                attention.q_proj.bias[:3], attention.q_proj.bias[16:19] = 12 * angle.cos(), -12 * angle.sin()
                attention.o_proj.weight[second, first] = torch.eye(code)
            if i == layer:
                attention.q_proj.weight[slow, slow] = 3.0
                attention.k_proj.weight[slow, [code + d for d in slow]] = 3.0
                attention.o_proj.weight[first, first] = 4 * torch.eye(code)
    base.save_pretrained(folder)
    return folder


def selected(folder: Path, keep: int = 1, tokens: int = 40_000, text: list[Document] = TEXT, **fields: Any) -> Any:
    recipe: dict[str, Any] = {"version": 1, "name": "tiny", "base": "b", "precision": "float32"}
    recipe |= {"mixer": {"type": "gla", "window": 8, "sinks": 2}, "data": {"text": {"source": "pydoc"}}}
    recipe |= {"layers": {"softmax_auto": keep, "select": "gates", "select_tokens": tokens}}
    built = build(recipe | fields, "recipe")
    plan = make_plan(built, load_config(folder))
    return single_steps.choose_layers(built, plan, text, folder, tiny_tokenizer(), CPU).softmax


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to calibrate and to measure on, and small steps."""
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    monkeypatch.setitem(layer_selection.DRAWS, "cpu", 2)
    monkeypatch.setattr(gate_selection, "ROWS", 2)
    monkeypatch.setattr(gate_selection, "RATE", 0.3)


# --- the mix


@pytest.mark.parametrize(("family", "mixer"), quick_pairs("gates"))
def test_gates_of_one_are_the_base_and_gates_of_zero_the_linear_model(family: str, mixer: str, tmp_path: Path) -> None:
    folder = save_tiny_base(family, tmp_path, tokenizer=False)
    spec = resolve_spec({"type": mixer, "window": 5, "sinks": 2})
    model = linearize_base(folder, {"format": 2, "mixers": {"main": spec}, "layers": ["main"] * 3}).eval()
    ids = torch.randint(3, 101, (2, 29), generator=torch.Generator().manual_seed(0))

    def logits(of: Any) -> torch.Tensor:
        with torch.no_grad():
            return of(ids, use_cache=False).logits

    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = {1.0: logits(base), 0.0: logits(model)}
    switch, found = Switch(base, model, torch.device("cpu")), {}
    for gate in (0.0, 0.5, 1.0):
        with gate_selection.gated(switch, torch.logit(torch.full((3,), gate))) as mixed:
            found[gate] = logits(mixed())
    torch.testing.assert_close(found[0.0], expected[0.0])
    torch.testing.assert_close(found[1.0], expected[1.0])
    assert all((found[0.5] - expected[gate]).abs().max() > 1e-3 for gate in expected)
    assert torch.equal(logits(switch.set_softmax(())), expected[0.0])  # no gate is left


# --- what is found


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("layer", [1, 3])
def test_the_layer_that_copying_hangs_on_has_the_largest_gate(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = selected(copier(layer), tokens=10_000)
    assert found.softmax_layers == [layer]
    others = [gate for i, gate in found.gates.items() if i != layer]
    assert found.gates[layer] > 1.5 * max(others)
    # what it is chosen for: with it the model copies like the base, without it hardly at all
    ((_, reached),) = found.path
    assert reached.copy_nll == pytest.approx(found.base.copy_nll, abs=0.1)
    assert found.linear.copy_nll > found.base.copy_nll + 2
    # the control: the same gates, dealt to other layers
    gates = dict(zip(found.gates, [*list(found.gates.values())[1:], found.gates[0]], strict=True))
    monkeypatch.setattr(gate_selection, "train_gates", lambda *_: gates)
    shuffled = selected(copier(layer), tokens=10_000)
    assert shuffled.softmax_layers == [layer - 1]
    assert shuffled.path[0][1].copy_nll > found.base.copy_nll + 2


@pytest.mark.usefixtures("_quick")
def test_the_same_seed_gives_the_same_gates_and_another_one_others() -> None:
    first, again, other = (selected(copier(), tokens=1500, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.gates != other.gates
    assert sum(first.gates.values()) < DEPTH / 2  # pushed down from a half each


@pytest.mark.usefixtures("_quick")
def test_nothing_but_the_gates_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    switches: list[Switch] = []
    real = single_steps.make_switch

    def kept(*args: Any, **options: Any) -> Switch:
        switches.append(real(*args, **options))
        before.update({name: p.clone() for name, p in switches[0].model.named_parameters()})
        return switches[0]

    before: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(single_steps, "make_switch", kept)
    selected(copier(), tokens=1500)
    (switch,) = switches
    after = dict(switch.set_softmax(()).named_parameters())
    assert all(p.equal(before[name]) and p.grad is None for name, p in after.items())
    assert all(p.grad is None for attention in switch.attentions for p in attention.parameters())


def test_ties_go_to_the_lower_layer() -> None:
    assert largest({0: 0.2, 3: 0.7, 4: 0.7, 9: 0.9}, 3) == [9, 3, 4]


# --- what it says


def test_a_selection_shows_every_gate_and_every_choice() -> None:
    path = [(5, CopyLosses(2.0, 3.0)), (0, CopyLosses(1.0, 2.5))]
    found = GateSelection(CopyLosses(0.5, 2.0), CopyLosses(4.0, 3.5), {}, {}, path, {0: 0.6, 2: 0.125, 5: 0.9})
    assert found.softmax_layers == [0, 5]
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert list(told) == ["softmax_layers", "base", "linear", "layers", "path", "select"]
    assert told["layers"][1] == {"layer": 2, "gate": 0.125}
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(found.render())
    text = console.export_text()
    assert "0.125" in text
    assert " 1. " in text
    assert "+ 5" in text


@pytest.mark.usefixtures("_quick")
def test_gates_that_cannot_be_trained_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_selection, "kl_divergence", lambda logits, *_: logits.sum() * float("nan"))
    with pytest.raises(LinearizeError, match=r"the loss is nan at step 1 of 2; set it to copy"):
        selected(copier(), tokens=1500)


def test_gates_need_something_to_choose_and_text_to_choose_on() -> None:
    layers: dict[str, Any] = {"softmax": [1], "select": "gates"}
    with pytest.raises(BadInput, match=r"layers\.select: nothing is left to choose"):
        selected(copier(), layers=layers)
    with pytest.raises(BadInput, match=r"200 training tokens are too few for the two spans of 128"):
        selected(copier(), text=[Document(IDS[:200], np.ones(200, bool), 200)])
