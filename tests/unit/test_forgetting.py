"""A window with a forget gate is the Forgetting Transformer's attention. At the start it hardly differs from the plain
window.
"""

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
from liger_convert.utils.errors import BadInput

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


PRO: list[dict[str, Any]] = [
    {"gate": "learned"},
    {"gate": "fixed", "shortest": 2, "longest": 16},
    {"kv_shift": True},
    {"qk_norm": True},
    {"rope": False},
    {"output_norm": "rms"},
    {"output_gate": True},
    {
        "gate": "learned",
        "kv_shift": True,
        "qk_norm": True,
        "rope": False,
        "output_norm": "rms",
        "output_gate": True,
        "window": 9,
    },
]


def published(attention: Any, x_BTC: torch.Tensor, angles: Any, options: dict[str, Any]) -> torch.Tensor:
    """The layer's output [B,T,C] in float64, one query after another."""
    p = {name: parameter.double() for name, parameter in attention.named_parameters()}
    x = x_BTC.double()
    q, k, v = ((x @ p[f"{name}_proj.weight"].T).unflatten(-1, (-1, 8)) for name in "qkv")
    if options.get("kv_shift"):
        earlier = [torch.cat((torch.zeros_like(y[:, :1]), y[:, :-1]), 1) for y in (k, v)]
        shares = [(x @ p[f"mixer.shift.{name}_GC"].T).tanh()[..., None] for name in ("key", "value")]
        k, v = ((1 - share) * y + share * before for y, before, share in zip((k, v), earlier, shares))
    if options.get("qk_norm"):
        sizes = p["mixer.qk_norm.q_size_HD"], p["mixer.qk_norm.k_size_GD"]
        q, k = (size * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() for y, size in zip((q, k), sizes))
    if options.get("rope", True):
        cos, sin = (angle.double()[:, :, None] for angle in angles)
        q, k = (y * cos + torch.cat((-y[..., 4:], y[..., :4]), -1) * sin for y in (q, k))
    gate = options.get("gate", "input")
    if gate == "fixed":
        log_f_BTG = -1 / torch.tensor([2.0, 16.0], dtype=torch.float64).expand(B, T, 2)
    else:
        logits = x @ p["mixer.forget_GC"].T if gate == "input" else torch.zeros(B, T, 2)
        log_f_BTG = (logits + p["mixer.forget_bias_G"]).sigmoid().log()
    o = torch.zeros(B, T, 4, 8, dtype=torch.float64)
    for b, t, h in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(4)).tolist():
        seen = range(max(0, t - (options.get("window") or T) + 1), t + 1)
        logits = [q[b, t, h] @ k[b, s, h // 2] * 8**-0.5 + log_f_BTG[b, s + 1 : t + 1, h // 2].sum() for s in seen]
        o[b, t, h] = torch.stack(logits).softmax(0) @ v[b, list(seen), h // 2]
    if options.get("output_norm") == "rms":
        o = p["mixer.read_norm.size_HV"] * o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if options.get("output_gate"):
        o = o * 2 * (x @ p["mixer.read_gate.weight_EC"].T).sigmoid().view(o.shape)
    return o.flatten(2) @ p["o_proj.weight"].T


def both(
    base: Path, options: dict[str, Any], told: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The output of a layer with `options`, that of the loop that follows the options in `told`, and what both are
    made of: the layer's input and all its parameters."""
    model = build(base, type="forgetting", **options)
    torch.manual_seed(0)
    x_BTC, attention = torch.randn(B, T, C, requires_grad=True), model.model.layers[1].self_attn
    with torch.no_grad():
        for parameter in attention.mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        if "forget_bias_G" in dict(attention.mixer.named_parameters()):
            attention.mixer.forget_bias_G.fill_(1.0)
    positions = torch.arange(T)[None]
    angles = model.model.rotary_emb(x_BTC, positions)
    got_BTC, _ = attention(x_BTC, angles, metadata=SequenceMetadata.build(x_BTC, positions, None))
    return got_BTC, published(attention, x_BTC, angles, told), {"x": x_BTC, **dict(attention.named_parameters())}


def layer_error(base: Path, options: dict[str, Any], told: dict[str, Any]) -> float:
    """The relative error of a layer with `options`, compared with the loop that follows the options in `told`."""
    got_BTC, expected_BTC, _ = both(base, options, told)
    return float((got_BTC - expected_BTC).norm() / expected_BTC.norm())


@pytest.mark.parametrize("options", PRO, ids=str)
@torch.no_grad()
def test_a_piece_of_the_pro_block_is_the_papers(base: Path, options: dict[str, Any]) -> None:
    assert layer_error(base, options, options) <= 4 * T * torch.finfo(torch.float32).eps
    if set(options) & {"gate"}:
        return  # without it, the loop asks for weights that are not there
    for name in options:
        assert layer_error(base, options, {key: x for key, x in options.items() if key != name}) > 1e-3, name


@pytest.mark.parametrize("options", PRO, ids=str)
def test_the_gradients_of_a_piece_are_those_of_the_loop(base: Path, options: dict[str, Any]) -> None:
    got_BTC, expected_BTC, leaves = both(base, options, options)
    d_BTC = torch.randn(B, T, C)
    ours = torch.autograd.grad(got_BTC, list(leaves.values()), d_BTC)
    exact = torch.autograd.grad(expected_BTC, list(leaves.values()), d_BTC.double())
    for name, found, wanted in zip(leaves, ours, exact, strict=True):
        # sums over all tokens of the rows, each exact to T roundings as the outputs are
        assert (found - wanted).norm() <= 4 * T * torch.finfo(torch.float32).eps * wanted.norm(), name


@pytest.mark.parametrize("options", [{"kv_shift": True}, {"output_gate": True}, {"gate": "learned"}], ids=str)
@torch.no_grad()
def test_pieces_start_as_the_identity(base: Path, options: dict[str, Any]) -> None:
    tokens = torch.randint(3, 101, (B, T), generator=torch.Generator().manual_seed(0))
    found = [build(base, type="forgetting", **spec)(tokens).logits for spec in ({}, options)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "range_of", [{"shortest": 4, "longest": 2}, {"longest": 8}, {"shortest": 1, "longest": 10**9}], ids=str
)
def test_a_range_of_gates_goes_upwards(range_of: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="is not a range of tokens"):
        resolve_spec({"type": "forgetting", **range_of})


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
