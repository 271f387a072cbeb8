"""The norm and gate after a memory's read, and what a query reads of its own token, compared with float64 formulas.

Shapes: B batch, T tokens, C hidden size, H query heads, G key-value heads, D head size (of values too).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, Mixer
from liger_convert.mixers.read_pieces import ReadGate, ReadNorm
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.utils.errors import BadInput

T, C, H, G, D = 23, 32, 4, 2, 8
WINDOW, SINKS = 5, 2
DIMS = HeadDims(hidden=C, heads=H, kv_heads=G, dim=D)
EPS = torch.finfo(torch.float32).eps


def random_qkv() -> QKV:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, T, heads, D, generator=generator) for heads in (H, G, G))
    return QKV(q, k, q, k, v, torch.arange(T)[None], torch.randn(1, T, C, generator=generator))


def metadata_of(tokens: int) -> SequenceMetadata:
    return SequenceMetadata.build(torch.empty(1, tokens), torch.arange(tokens)[None], None)


def started(**spec: Any) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec({"window": WINDOW, "sinks": SINKS, **spec}), DIMS)
    mixer.reset_parameters()
    return mixer


def assert_close(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert found.shape == expected.shape
    # some roundings a token, and a norm multiplies those of a read that is nearly 0
    assert (found - expected).abs().max() <= 100 * T * EPS * expected.abs().max(), what


def assert_same_gradients(found: Tensor, leaves: list[Tensor], expected: Tensor, exact: list[Tensor]) -> None:
    assert_close(found, expected, "the output")
    d = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad(found, leaves, d.to(found.dtype))
    for i, (got, want) in enumerate(zip(ours, torch.autograd.grad(expected, exact, d.double()))):
        assert_close(got, want, f"gradient {i}")


def leaves_of(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    ours = [x.detach().clone().requires_grad_() for x in tensors]
    return ours, [x.detach().double().requires_grad_() for x in tensors]


def test_a_norm_and_a_gate_are_their_formulas_and_so_are_their_gradients() -> None:
    torch.manual_seed(0)
    norm, gate = ReadNorm(DIMS), ReadGate(DIMS)
    with torch.no_grad():
        norm.size_HV.normal_()
        gate.weight_EC.normal_(std=C**-0.5)
    (o, x), (o_, x_) = leaves_of(torch.randn(1, T, H, D), torch.randn(1, T, C))
    size_, weight_ = (p.detach().double().requires_grad_() for p in (norm.size_HV, gate.weight_EC))
    normed = size_ * o_ / (o_.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = 2 / (1 + (-(x_ @ weight_.T)).exp()).view(1, T, H, D) * normed
    found = gate(norm(o), x)
    assert_same_gradients(found, [o, x, norm.size_HV, gate.weight_EC], expected, [o_, x_, size_, weight_])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_starts_as_the_identity_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    gate, o, x = ReadGate(DIMS), torch.randn(1, T, H, D, dtype=dtype), torch.randn(1, T, C, dtype=dtype)
    gate.reset_parameters()
    assert torch.equal(gate(o, x), o)
    assert gate(o, x).dtype == dtype
    with torch.no_grad():
        gate.weight_EC += 0.1
    assert not torch.equal(gate(o, x), o)


@pytest.mark.parametrize("name", ["deltanet", "titans", "mamba"])
@pytest.mark.parametrize("scope", ["evicted", "all"])
@torch.no_grad()
def test_norm_and_gate_are_of_the_memorys_read_and_the_layers_input(name: str, scope: str) -> None:
    mixer, plain, qkv = (
        started(type=name, scope=scope, output_norm="rms", output_gate=True),
        started(type=name, scope=scope),
        random_qkv(),
    )
    assert mixer.read_norm is not None
    assert mixer.read_gate is not None
    torch.manual_seed(0)
    mixer.read_gate.weight_EC.normal_()
    o = plain.remember(qkv, metadata_of(T), None).o_BTHV.double()
    o = 0.1 * o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = 2 * (qkv.x_BTC.double() @ mixer.read_gate.weight_EC.double().T).sigmoid()
    assert_close(mixer.remember(qkv, metadata_of(T), None).o_BTHV, gate.view(1, T, H, D) * o)
    assert mixer.calibration().read_size is mixer.read_norm.size_HV


@pytest.mark.parametrize("name", ["s4", "mamba"])
@pytest.mark.parametrize("scope", ["evicted", "all"])
def test_a_skip_adds_the_tokens_own_value(name: str, scope: str) -> None:
    mixer, plain, qkv = started(type=name, scope=scope, skip=True), started(type=name, scope=scope), random_qkv()
    without = plain.remember(qkv, metadata_of(T), None).o_BTHV.detach()
    assert torch.equal(mixer.remember(qkv, metadata_of(T), None).o_BTHV, without)
    skip = mixer.get_parameter("skip_HV")
    with torch.no_grad():
        skip.normal_(generator=torch.Generator().manual_seed(0))
    d = skip.detach().double().requires_grad_()
    expected = without.double() + d * qkv.v_BSGD.double().repeat_interleave(H // G, 2)
    assert_same_gradients(mixer.remember(qkv, metadata_of(T), None).o_BTHV, [skip], expected, [d])


@pytest.mark.parametrize("scope", ["evicted", "all"])
def test_mamba2_adds_its_skip_before_the_norm(scope: str) -> None:
    mixer, plain, qkv = (
        started(type="mamba2", scope=scope, skip=True),
        started(type="mamba2", scope=scope),
        random_qkv(),
    )
    read = plain.remember(qkv, metadata_of(T), None).o_BTHV.detach()
    assert torch.equal(mixer.remember(qkv, metadata_of(T), None).o_BTHV, read)
    skip, size = mixer.get_parameter("skip_H1"), mixer.get_parameter("size_HV")
    with torch.no_grad():
        skip.normal_(generator=torch.Generator().manual_seed(0))
    unnormed = mamba2(qkv, scope)
    d, s = (x.detach().double().requires_grad_() for x in (skip, size))
    expected = unnormed + d * qkv.v_BSGD.double().repeat_interleave(H // G, 2)
    expected = s * expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_same_gradients(mixer.remember(qkv, metadata_of(T), None).o_BTHV, [skip, size], expected, [d, s])


def mamba2(qkv: QKV, scope: str) -> Tensor:
    """The read [1,T,H,D] of a new mixer before its norm, token by token: dt = softplus(pool(k) - 7), a = e^-dt."""
    q, k, v = (x[0].double() for x in (qkv.q_BTHD, qkv.k_BTGD, qkv.v_BSGD))
    delay, first = (WINDOW, SINKS) if scope == "evicted" else (0, 0)
    dt = torch.nn.functional.softplus(k.mean(-1) - 7)
    states = [torch.zeros(G, D, D, dtype=torch.float64)]
    for t in range(T):
        written = (-dt[t]).exp()[:, None, None] * states[-1] + torch.einsum("g,gd,gv->gdv", dt[t], k[t], v[t])
        states.append(written if t >= first else states[-1])
    reads = [
        torch.einsum("hd,hdv->hv", q[t], states[max(t + 1 - delay, 0)].repeat_interleave(H // G, 0)) for t in range(T)
    ]
    return torch.stack(reads)[None]


def test_a_skip_is_of_the_convolved_value_where_that_is_the_tokens_own() -> None:
    qkv = random_qkv()
    for scope, convolved in (("all", True), ("evicted", False)):
        options = {"type": "mamba", "scope": scope, "short_conv": 4}
        mixer, plain = started(**options, skip=True), started(**options)
        with torch.no_grad():
            mixer.get_parameter("skip_HV").fill_(1.0)
            for each in (mixer, plain):
                each.get_parameter("short_conv.v.weight_NDK")[..., 0] = 0.5  # three tokens back
        added = mixer.remember(qkv, metadata_of(T), None).o_BTHV - plain.remember(qkv, metadata_of(T), None).o_BTHV
        v = qkv.v_BSGD.clone()
        if convolved:
            v[:, 3:] += 0.5 * qkv.v_BSGD[:, :-3]
        torch.testing.assert_close(added.detach(), v.repeat_interleave(H // G, 2), atol=1e-5, rtol=1e-5)


def rwkv6(p: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, scope: str) -> Tensor:
    """The read [T,H,D] of the tokens before the window, or of all earlier tokens, plus the own token weighted by u,
    after the norm."""
    delay, first = (WINDOW, SINKS) if scope == "evicted" else (1, 0)
    heads = []
    for h in range(H):
        g = h // (H // G)
        states = [torch.zeros(D, D, dtype=torch.float64)]
        for t in range(T):
            a = (-(k[t, g] + p["gate_bias_GF"][g]).exp()).exp()
            states.append(a[:, None] * states[-1] + k[t, g].outer(v[t, g]) if t >= first else states[-1])
        outputs = []
        for t in range(T):
            state = states[max(t + 1 - delay, 0)] + (p["bonus_GF"][g] * k[t, g]).outer(v[t, g])
            o = q[t, h] @ state
            outputs.append(p["size_HV"][h] * o / (o.square().mean() + 1e-6).sqrt())
        heads.append(torch.stack(outputs))
    return torch.stack(heads, 1)


@pytest.mark.parametrize("scope", ["evicted", "all"])
def test_a_bonus_is_the_papers_and_so_are_its_gradients(scope: str) -> None:
    mixer, qkv = started(type="rwkv6", scope=scope, bonus=True, gate_bias=-1.0), random_qkv()
    with torch.no_grad():
        mixer.get_parameter("bonus_GF").normal_(generator=torch.Generator().manual_seed(0))
    (q, k, v), exact = leaves_of(qkv.q_BTHD, qkv.k_BTGD, qkv.v_BSGD)
    named = {name: p for name, p in mixer.named_parameters() if name != "mix_H"}
    p = {name: x.detach().double().requires_grad_() for name, x in named.items()}
    qkv = qkv._replace(q_BTHD=q, k_BTGD=k, v_BSGD=v)
    found = mixer.remember(qkv, metadata_of(T), None).o_BTHV
    expected = rwkv6(p, *(x[0] for x in exact), scope)[None]
    assert_same_gradients(found, [q, k, v, *named.values()], expected, [*exact, *p.values()])


def rwkv7(p: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, x: Tensor, scope: str) -> Tensor:
    """The normalized read [T,H,D] plus the own token weighted by rho, gated, one token after another."""
    delay, first = (WINDOW, SINKS) if scope == "evicted" else (0, 0)
    heads = []
    for h in range(H):
        g = h // (H // G)
        states, keys, outputs = [torch.zeros(D, D, dtype=torch.float64)], [], []
        for t in range(T):
            b, u = (k[t, g] + p["beta_bias_GX"][g]).sigmoid(), k[t, g] * p["xi_GD"][g]
            w, u = (-math.exp(-0.5) * (k[t, g] + p["gate_bias_GD"][g]).sigmoid()).exp(), u / u.norm()
            keys.append(k[t, g] / k[t, g].norm() * (1 + p["alpha_GD"][g] * (b - 1)))
            S = states[-1]
            states.append(w[:, None] * S - (b * u).outer(u @ S) + keys[t].outer(v[t, g]) if t >= first else S)
        for t in range(T):
            unit = q[t, h] / q[t, h].norm()
            o = unit @ states[max(t + 1 - delay, 0)]
            o = p["read_norm.size_HV"][h] * o / (o.square().mean() + 1e-6).sqrt()
            o = o + (unit * p["bonus_HD"][h] * keys[t]).sum() * v[t, g]
            gate = p["read_gate.weight_EC"].view(H, D, C)[h] @ x[t]
            outputs.append(2 * gate.sigmoid() * o)
        heads.append(torch.stack(outputs))
    return torch.stack(heads, 1)


@pytest.mark.parametrize("scope", ["evicted", "all"])
def test_the_bonus_of_rwkv7_is_between_norm_and_gate_and_so_are_its_gradients(scope: str) -> None:
    spec = {"type": "rwkv7", "scope": scope, "gate_bias": 0.0, "output_norm": "rms", "output_gate": True}
    mixer, qkv = started(**spec, bonus=True), random_qkv()
    assert torch.equal(mixer.remember(qkv, metadata_of(T), None).o_BTHV, read_of(started(**spec), qkv))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    (q, k, v, x), exact = leaves_of(qkv.q_BTHD, qkv.k_BTGD, qkv.v_BSGD, qkv.x_BTC)
    named = {name: p for name, p in mixer.named_parameters() if name != "mix_H"}
    p = {name: each.detach().double().requires_grad_() for name, each in named.items()}
    found = read_of(mixer, qkv._replace(q_BTHD=q, k_BTGD=k, v_BSGD=v, x_BTC=x))
    expected = rwkv7(p, *(each[0] for each in exact), scope)[None]
    assert_same_gradients(found, [q, k, v, x, *named.values()], expected, [*exact, *p.values()])
    without = rwkv7({**p, "bonus_HD": torch.zeros_like(p["bonus_HD"])}, *(each[0] for each in exact), scope)[None]
    assert (found - without).norm() > 1e-2 * without.norm()


def read_of(mixer: Mixer, qkv: QKV) -> Tensor:
    return mixer.remember(qkv, metadata_of(T), None).o_BTHV


def test_a_bonus_is_there_where_it_is_asked_for_and_starts_at_nothing() -> None:
    qkv, found = random_qkv(), []
    for bonus in (False, True):
        mixer = started(type="rwkv6", bonus=bonus)
        found.append(mixer.remember(qkv, metadata_of(T), None).o_BTHV)
        assert ("bonus_GF" in dict(mixer.named_parameters())) == bonus
    assert torch.equal(*found)
    of_all = [started(type="rwkv6", scope="all", bonus=bonus) for bonus in (False, True)]
    assert all(torch.equal(mixer.get_parameter("bonus_GF"), torch.ones(G, D)) for mixer in of_all)


def test_pieces_are_refused_where_they_have_no_place() -> None:
    for spec, field in (
        ({"type": "retnet", "output_norm": "rms"}, "output_norm"),
        ({"type": "deltanet", "output_norm": "layer"}, "output_norm"),
        ({"type": "deltanet", "skip": True}, "skip"),
        ({"type": "gla", "bonus": True}, "bonus"),
        ({"type": "mom", "inner": {"type": "gla", "output_gate": True}}, "inner.output_gate"),
        ({"type": "mamba2", "skip": True, "normalize": True, "feature_map": "exp"}, "skip"),
        ({"type": "mamba2", "norm_after_gate": True}, "norm_after_gate"),
        ({"type": "mamba2", "norm_all_heads": True, "normalize": True, "feature_map": "exp"}, "norm_all_heads"),
        (
            {"type": "mamba2", "norm_after_gate": True, "output_gate": True, "normalize": True, "feature_map": "exp"},
            "norm_after_gate",
        ),
    ):
        with pytest.raises(BadInput, match=rf"^mixer\.{field}: "):
            resolve_spec(spec)


def test_no_fused_step_is_taken_for_a_gate() -> None:
    assert started(type="gla").step_config() is not None
    assert started(type="gla", output_gate=True).step_config() is None
