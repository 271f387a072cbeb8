"""Each delta-rule mixer is the recurrence of its paper, written out here one token and one head after another.

Shapes: T tokens, H query heads, G key-value heads, D head size (of values too).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims

T, H, G, D = 41, 4, 2, 8
Loop = Callable[[dict[str, Tensor], Tensor, Tensor], Iterator[Tensor]]


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def deltanet(p: dict[str, Tensor], k_TD: Tensor, v_TD: Tensor) -> Iterator[Tensor]:
    S = torch.zeros_like(k_TD.T @ v_TD)
    for k, v in zip(k_TD, v_TD):
        u, beta = unit(k), (k.mean() + p["beta_bias_GX"]).sigmoid()
        S = S - beta * u.outer(u) @ S + beta * u.outer(v)
        yield S


def gated_deltanet(p: dict[str, Tensor], k_TD: Tensor, v_TD: Tensor) -> Iterator[Tensor]:
    S, eye = torch.zeros_like(k_TD.T @ v_TD), torch.eye(D, dtype=torch.float64)
    for k, v in zip(k_TD, v_TD):
        u, beta = unit(k), (k.mean() + p["beta_bias_GX"]).sigmoid()
        alpha = 1 / (1 + (k.mean() + p["gate_bias_G1"]).exp())
        S = alpha * (eye - beta * u.outer(u)) @ S + beta * u.outer(v)
        yield S


def kda(p: dict[str, Tensor], k_TD: Tensor, v_TD: Tensor) -> Iterator[Tensor]:
    S, eye = torch.zeros_like(k_TD.T @ v_TD), torch.eye(D, dtype=torch.float64)
    for k, v in zip(k_TD, v_TD):
        u, beta = unit(k), (k.mean() + p["beta_bias_GX"]).sigmoid()
        alpha = 1 / (1 + (k + p["gate_bias_GD"]).exp())
        S = (eye - beta * u.outer(u)) @ alpha.diag() @ S + beta * u.outer(v)
        yield S


def gated_deltanet2(p: dict[str, Tensor], k_TD: Tensor, v_TD: Tensor) -> Iterator[Tensor]:
    S, eye = torch.zeros_like(k_TD.T @ v_TD), torch.eye(D, dtype=torch.float64)
    for k, v in zip(k_TD, v_TD):
        u, erase, write = unit(k), (k + p["beta_bias_GX"]).sigmoid(), (v + p["write_bias_GV"]).sigmoid()
        alpha = 1 / (1 + (k + p["gate_bias_GD"]).exp())
        S = (eye - u.outer(erase * u)) @ alpha.diag() @ S + u.outer(write * v)
        yield S


def rwkv7(p: dict[str, Tensor], k_TD: Tensor, v_TD: Tensor) -> Iterator[Tensor]:
    S = torch.zeros_like(k_TD.T @ v_TD)
    for k, v in zip(k_TD, v_TD):
        u, beta = unit(k * p["xi_GD"]), (k + p["beta_bias_GX"]).sigmoid()
        w = (-math.exp(-0.5) * (k + p["gate_bias_GD"]).sigmoid()).exp()
        written = unit(k) * (1 + p["alpha_GD"] * (beta - 1))
        S = (w.diag() - (beta * u).outer(u)) @ S + written.outer(v)
        yield S


def ttt(p: dict[str, Tensor], k_TD: Tensor, v_TD: Tensor) -> Iterator[Tensor]:
    W = p["start_GDV"]
    for k, v in zip(k_TD, v_TD):
        W = W.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((unit(k) @ W - v).square().sum() / 2, W)
        W = W - 1.5 * (k.mean() + p["beta_bias_GX"]).sigmoid() * gradient
        yield W


def titans(p: dict[str, Tensor], k_TD: Tensor, v_TD: Tensor) -> Iterator[Tensor]:
    M = Z = torch.zeros_like(k_TD.T @ v_TD)
    for k, v in zip(k_TD, v_TD):
        theta, eta = ((k.mean() + p[name]).sigmoid() for name in ("beta_bias_GX", "momentum_bias_G1"))
        forgotten = (k.mean() + p["gate_bias_G1"]).sigmoid()
        M = M.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((unit(k) @ M - v).square().sum() / 2, M)
        Z = eta * Z - theta * gradient
        M = (1 - forgotten) * M + Z
        yield M


@pytest.mark.parametrize(
    ("name", "options", "loop"),
    [
        ("deltanet", {}, deltanet),
        ("gated-deltanet", {"gate_bias": -2.0}, gated_deltanet),
        ("gated-deltanet-2", {"gate_bias": -2.0}, gated_deltanet2),
        ("kda", {"gate_bias": -2.0}, kda),
        ("rwkv7", {"gate_bias": 0.0}, rwkv7),
        ("ttt", {"learning_rate": 1.5}, ttt),
        ("titans", {"gate_bias": -2.0}, titans),
    ],
)
def test_a_mixer_is_the_recurrence_of_its_paper(name: str, options: dict[str, Any], loop: Loop) -> None:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec({"type": name, "scope": "all", **options}), HeadDims(32, H, G, D))
    mixer.reset_parameters()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    q_THD, k_TGD, v_TGD = torch.randn(T, H, D), torch.randn(T, G, D), torch.randn(T, G, D)
    x = torch.zeros(1, T, 32)
    qkv = QKV(q_THD[None], k_TGD[None], q_THD[None], k_TGD[None], v_TGD[None], x[..., 0], x)
    with torch.no_grad():
        memory, _ = mixer.scan(qkv, mixer.write(mixer.deferred_inputs(qkv), v_TGD[None]), {}, None, exclusive=False)
    for h in range(H):
        g = h // (H // G)
        parameters = {n: p.detach().double()[g] for n, p in mixer.named_parameters() if n != "mix_H"}
        states = loop(parameters, k_TGD[:, g].double(), v_TGD[:, g].double())
        expected = torch.stack([unit(q) @ S.detach() for q, S in zip(q_THD[:, h].double(), states)])
        # T tokens of some ten roundings each, were they all to add up
        tolerance = 10 * T * torch.finfo(torch.float32).eps
        assert (memory.o_BTHV[0, :, h] - expected).norm() <= tolerance * expected.norm()


def reads_of(spec: dict[str, Any], x: QKV) -> Tensor:
    mixer = build_mixer(resolve_spec(spec), HeadDims(32, H, G, D))
    mixer.reset_parameters()
    entries = mixer.write(mixer.deferred_inputs(x), x.v_BSGD)
    return mixer.scan(x, entries, {}, None, exclusive=False)[0].o_BTHV


@torch.no_grad()
def test_gated_deltanet_2_with_one_gate_for_both_is_kda() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, T, H, D), torch.randn(1, T, G, D), torch.randn(1, T, G, D)
    x = QKV(q, k, q, k, v, torch.zeros(1, T), torch.zeros(1, T, 32))
    same = {"beta": "constant", "beta_bias": 0.3, "gate_bias": -2.0}
    kda_o = reads_of({"type": "kda", **same}, x)
    torch.testing.assert_close(reads_of({"type": "gated-deltanet-2", "write_bias": 0.3, **same}, x), kda_o)
    other = reads_of({"type": "gated-deltanet-2", "write_bias": 0.5, **same}, x)
    assert (other - kda_o).norm() > 1e-2 * kda_o.norm()
