"""A forward without requests runs a linearized layer's prefill once, on a page of its own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from paged import PagedAttention, paged
from tiny_models import SINKS, WINDOW, build
from torch import Tensor

from liger_convert.serving import warm_up as module
from liger_convert.serving.layer import LayerPages, StepTensors, attend_batch
from liger_convert.serving.warm_up import Chunks, WarmUp, steps_of

SPECS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", "window": WINDOW, "sinks": SINKS},
    "no sinks": {"type": "gla", "window": WINDOW, "sinks": 0},
    "a window of one token": {"type": "gla", "window": 1, "sinks": 0},
    "a gate for each token": {"type": "gla", "window": WINDOW, "sinks": SINKS, "forget": True},
    "a short convolution": {"type": "gla", "window": WINDOW, "sinks": SINKS, "short_conv": 4},
    "liger-paper": {"type": "liger-paper", "window": WINDOW},
    "gated-deltanet": {"type": "gated-deltanet", "window": WINDOW, "sinks": SINKS},
    "gsa": {"type": "gsa", "window": WINDOW, "sinks": SINKS},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The lengths and earlier tokens of every step that is run. All outputs must be finite, and are then let go."""
    found, kept = [], []

    def watched(layer: Any, pages: LayerPages, batch: Any, step: StepTensors, metadata: Any, o_NHD: Tensor) -> None:
        assert [tensor() for tensor in kept] == [None] * len(kept)
        attend_batch(layer, pages, batch, step, metadata, o_NHD)
        assert o_NHD.shape[0] == step.x_1NC.shape[1]
        assert o_NHD.isfinite().all()
        assert pages.pages.isfinite().all()
        assert pages.pages.any()
        kept.append(weakref.ref(o_NHD))
        found.append((torch.tensor(batch._starts).diff().tolist(), batch._seen))

    monkeypatch.setattr(module, "attend_batch", watched)
    return found


def run(warm_up: WarmUp, model: Any, layer: PagedAttention, tokens: int) -> None:
    x_1NC = torch.randn(1, tokens, model.config.hidden_size, generator=torch.Generator().manual_seed(tokens))
    position_1N = torch.zeros(1, tokens, dtype=torch.long)  # all tokens at one position, as in a server's own forward
    with torch.no_grad():
        step = StepTensors(x_1NC, *layer.base_qkv(x_1NC), *model.model.rotary_emb(x_1NC, position_1N))
        warm_up.run(layer, step, position_1N)


@pytest.mark.parametrize("spec", SPECS)
def test_it_runs_once_and_touches_no_page(spec: str, calls: list[tuple[list[int], list[int]]]) -> None:
    model = build("llama", ["main"] * 3, **SPECS[spec])
    layers = paged(model)
    wanted = [(step.lengths, [step.seen] * len(step.lengths)) for step in steps_of(20, layers[0].pages.layout)]
    warm_up = WarmUp(layers[0].pages.layout)
    for tokens in (20, 20, 7, 1):
        for layer in layers:
            run(warm_up, model, layer, tokens)
    assert calls == wanted
    run(warm_up, model, layers[0], 21)
    assert len(calls) > len(wanted)
    assert all(layer.pages.pages.isnan().all() for layer in layers)


def test_it_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Watched(LayerPages):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.extend(weakref.ref(x) for x in (self, self.pages))

    monkeypatch.setattr(module, "LayerPages", Watched)
    model = build("llama", ["main"] * 3, **SPECS["gla"])
    layer = paged(model)[0]
    run(WarmUp(layer.pages.layout), model, layer, 20)
    gc.collect()
    assert [thing() for thing in made] == [None, None]


def test_the_steps_of_a_server() -> None:
    layout = paged(build("llama", ["main"] * 3, **SPECS["gla"]))[0].pages.layout
    long = layout.cache_window + SINKS
    assert steps_of(512, layout) == [
        *(Chunks([n], seen) for n in (512, 445, 256, 253, 64, 61) for seen in (0, long)),
        *(Chunks([n, n - 3], seen) for n in (64, 61) for seen in (0, 1)),
        Chunks([1, 1], long),
        Chunks([511, 1], 0),
    ]
    assert steps_of(2, layout) == [Chunks([2], 0), Chunks([2], long), Chunks([1, 1], long), Chunks([1, 1], 0)]
    assert steps_of(1, layout) == [Chunks([1], 0), Chunks([1], long)]
    assert all(sum(step.lengths) <= 2048 for step in steps_of(2048, layout))
