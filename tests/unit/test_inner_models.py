"""The models that TTT and Titans train are those of their papers, written out here for one head: gradients by autograd,
one token after another.

Shapes: T tokens, H query heads, G key-value heads, D head size (of values too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, Mixer
from liger_convert.utils.errors import BadInput

T, H, G, D = 41, 4, 2, 8
Parameters = dict[str, Tensor]
Read = Callable[[Tensor], Tensor]

SPECS: list[dict[str, Any]] = [
    {"type": "ttt", "mini_batch": 16},
    {"type": "ttt", "inner_norm": True},
    {"type": "ttt", "inner_norm": True, "mini_batch": 16},
    {"type": "ttt", "model": "mlp", "mini_batch": 5, "learning_rate": 1.5},
    {"type": "ttt", "model": "mlp", "inner_norm": True, "mini_batch": 16},
    {"type": "titans", "mini_batch": 5, "gate_bias": -2.0},
    {"type": "titans", "model": "mlp", "gate_bias": -2.0},
    {"type": "titans", "model": "mlp", "mini_batch": 16, "gate_bias": -2.0},
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def output(p: Parameters, spec: dict[str, Any], weights: list[Tensor], x: Tensor) -> Tensor:
    one = x.new_ones(1)
    if spec.get("model") == "mlp":
        hidden = torch.cat((D**0.5 * x, one)) @ weights[0]
        y = torch.cat((nnf.gelu(hidden, approximate="tanh"), one)) @ weights[1]
    else:
        y = torch.cat((x, one)) @ weights[0]
    if not spec.get("inner_norm"):
        return y
    size, shift = p["model.norm_G2V"]
    return x + size * (y - y.mean()) / (y.var(correction=0) + 1e-6).sqrt() + shift


def trained(p: Parameters, spec: dict[str, Any], k_TD: Tensor, v_TD: Tensor) -> Iterator[Read]:
    """What reads the memory, after every token."""
    mini_batch, width = spec.get("mini_batch", 1), 4 * D if spec.get("model") == "mlp" else 2
    weights = [p[name] for name in ("model.first_GXY", "model.second_GXY") if name in p]
    steps = [torch.zeros_like(w) for w in weights]
    for t, (k, v) in enumerate(zip(k_TD, v_TD)):
        if t % mini_batch == 0:
            began = [w.clone().requires_grad_() for w in weights]
        loss = (output(p, spec, began, unit(k)) - v).square().sum() / 2
        gradients = torch.autograd.grad(loss, began)
        rate = spec.get("learning_rate", 1.0) * (k.mean() + p["beta_bias_GX"]).sigmoid() / mini_batch / width
        carried, forgotten = torch.zeros(()), torch.zeros(())
        if spec["type"] == "titans":
            carried, forgotten = ((k.mean() + p[name]).sigmoid() for name in ("momentum_bias_G1", "gate_bias_G1"))
        steps = [carried * step - rate * gradient for step, gradient in zip(steps, gradients)]
        weights = [(1 - forgotten) * w + step for w, step in zip(weights, steps)]
        yield lambda q, weights=weights: output(p, spec, weights, unit(q))  # type: ignore[misc]


def started(spec: dict[str, Any], noise: float = 0.3) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec({"scope": "all", **spec}), HeadDims(32, H, G, D))
    mixer.reset_parameters()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += noise * torch.randn_like(parameter)
    return mixer


def random_qkv() -> QKV:
    q, k, v = (torch.randn(1, T, heads, D) for heads in (H, G, G))
    return QKV(q, k, q, k, v, torch.arange(T)[None], torch.zeros(1, T, 32))


def read(mixer: Mixer, qkv: QKV) -> Tensor:
    entries = mixer.write(mixer.deferred_inputs(qkv), qkv.v_BSGD)
    return mixer.scan(qkv, entries, {}, None, exclusive=False)[0].o_BTHV


def relative_error(spec: dict[str, Any], published: dict[str, Any]) -> float:
    """The largest error over heads of a mixer with `spec`, compared with the loop of `published`."""
    mixer, qkv, errors = started(spec), random_qkv(), []
    with torch.no_grad():
        o_BTHV = read(mixer, qkv)
    for h in range(H):
        g = h // (H // G)
        p = {n: x.detach().double()[g] for n, x in mixer.named_parameters() if n != "mix_H"}
        q_TD, k_TD, v_TD = (x[0].double() for x in (qkv.q_BTHD[:, :, h], qkv.k_BTGD[:, :, g], qkv.v_BSGD[:, :, g]))
        expected = torch.stack([of_token(q) for q, of_token in zip(q_TD, trained(p, published, k_TD, v_TD))]).detach()
        errors.append(float((o_BTHV[0, :, h] - expected).norm() / expected.norm()))
    return max(errors)


@every_spec
def test_a_memory_is_the_model_that_its_paper_trains(spec: dict[str, Any]) -> None:
    # T tokens of some ten roundings each, were they all to add up
    assert relative_error(spec, spec) <= 10 * T * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        (SPECS[2], {"inner_norm": False}),
        (SPECS[2], {"mini_batch": 15}),
        (SPECS[4], {"inner_norm": False}),
        (SPECS[7], {"mini_batch": 1}),
        (SPECS[3], {"learning_rate": 1.4}),
    ],
    ids=str,
)
def test_the_reference_loop_differs_if_an_option_differs(spec: dict[str, Any], other: dict[str, Any]) -> None:
    assert relative_error(spec, spec | other) > 1e-3


@every_spec
def test_every_parameter_of_a_new_model_learns(spec: dict[str, Any]) -> None:
    mixer = started(spec, noise=0.0)
    (read(mixer, random_qkv()) ** 3).sum().backward()
    left = {name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.any()}
    assert left == {"mix_H"}, "which is of the memory beside the window"


@every_spec
def test_near_equal_keys_do_not_make_a_model_overshoot(spec: dict[str, Any]) -> None:
    """The same key and value are written repeatedly. The read has to come closer to the value each time."""
    if spec["type"] == "titans":
        spec = {**spec, "gate_bias": -20.0, "momentum_bias": -20.0}
    mixer, qkv = started(spec, noise=0.0), random_qkv()
    k_BTGD, v_BTGD = (x[:, :1].expand(-1, 8 * T, -1, -1) for x in (qkv.k_BTGD, qkv.v_BSGD))
    q_BTHD = k_BTGD.repeat_interleave(H // G, 2)
    qkv = QKV(q_BTHD, k_BTGD, q_BTHD, k_BTGD, v_BTGD, torch.arange(8 * T)[None], torch.zeros(1, 8 * T, 32))
    with torch.no_grad():
        missed_T = (read(mixer, qkv) - v_BTGD.repeat_interleave(H // G, 2)).flatten(2).norm(dim=-1)[0]
    assert missed_T[-1] < missed_T[0]
    assert (missed_T[1:] <= missed_T[:-1] + 1e-4 * missed_T[0]).all()


@pytest.mark.parametrize("mini_batch", [0, 2000])
def test_a_mini_batch_has_bounds(mini_batch: int) -> None:
    with pytest.raises(BadInput, match=r"mini_batch: \d+ is not from 1 to 1024"):
        resolve_spec({"type": "ttt", "mini_batch": mini_batch})
