"""A window that forgets is the Forgetting Transformer's attention, and starts as the window it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM

from liger_convert.mixers import resolve_spec
from liger_convert.mixers.base import FADED, FAR
from liger_convert.model.loading import linearize_base
from liger_convert.model.sequence import SequenceMetadata

B, T, C = 2, 40, 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"), tokenizer=False)


def build(base: Path, **spec: Any) -> Any:
    plan = {"format": 2, "mixers": {"main": resolve_spec(spec)}, "layers": ["main"] * 3}
    return linearize_base(base, plan, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("window", [1, 7, 64, 0])
@torch.no_grad()
def test_weights_fade_by_every_gate_since(base: Path, window: int) -> None:
    model = build(base, type="forgetting", window=window)
    torch.manual_seed(0)
    x_BTC, attention = torch.randn(B, T, C), model.model.layers[1].self_attn
    mixer = attention.mixer
    mixer.forget_GC.normal_()
    mixer.forget_bias_G.fill_(-1.0)
    positions = torch.arange(T)[None]
    embeddings = model.model.rotary_emb(x_BTC, positions)
    metadata = SequenceMetadata.build(x_BTC, positions, None)
    got_BTC, _ = attention(x_BTC, embeddings, metadata=metadata)

    _, _, q, k, v = (x.double() for x in attention.project(x_BTC, embeddings, metadata))
    log_f_BTG = (x_BTC @ mixer.forget_GC.mT + mixer.forget_bias_G).double().sigmoid().log()
    fade_BGTT = torch.full((B, 2, T, T), -torch.inf, dtype=torch.float64)
    for t in range(T):
        for s in range(max(0, t - (window or T) + 1), t + 1):
            fade_BGTT[:, :, t, s] = log_f_BTG[:, s + 1 : t + 1].sum(1)
    logits = torch.einsum("btgrd,bsgd->bgrts", q.unflatten(2, (2, -1)), k) * attention.scaling
    o_BTHD = torch.einsum("bgrts,bsgd->btgrd", (logits + fade_BGTT[:, :, None]).softmax(-1), v).flatten(2, 3)
    expected_BTC = attention.o_proj(o_BTHD.flatten(2).float())
    # the logits' sums are of size T, so each is exact to T roundings, and a weight with it
    assert (got_BTC - expected_BTC).norm() <= 4 * T * torch.finfo(torch.float32).eps * expected_BTC.norm()


@pytest.mark.parametrize(("window", "fade"), [(T, FADED), (4 * T, FADED / 4), (0, FADED * T / FAR)])
@torch.no_grad()
def test_a_new_gate_hardly_forgets(base: Path, window: int, fade: float) -> None:
    mixer = build(base, type="forgetting", window=window).model.layers[0].self_attn.mixer
    log_f = nnf.logsigmoid(mixer.forget_bias_G.double())
    torch.testing.assert_close(-T * log_f, torch.full_like(log_f, fade), rtol=1e-2, atol=0)
    assert not mixer.forget_GC.any()


@torch.no_grad()
def test_a_softmax_layer_with_an_open_gate_is_the_base(base: Path) -> None:
    tokens = torch.randint(3, 101, (B, T), generator=torch.Generator().manual_seed(0))
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()(tokens).logits
    new = build(base, type="forgetting")
    assert (new(tokens).logits - plain).norm() < 1e-3 * plain.norm()
    for layer in new.model.layers:
        layer.self_attn.mixer.forget_bias_G.fill_(100.0)
    torch.testing.assert_close(new(tokens).logits, plain, rtol=1e-4, atol=1e-5)
