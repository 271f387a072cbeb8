"""Mixers over slots and state spaces are the equations of their papers, written out here for one head as one sum over
tokens, and start with little weight.

Shapes: T tokens, H query heads, G key-value heads, D head size (of values too), M slots, F states of a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gated_kernels.swa.chunk import chunk_swa, combine
from torch import Tensor

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, Mixer
from liger_convert.model.sequence import SequenceMetadata

T, H, G, D = 41, 4, 2, 8
Parameters = dict[str, Tensor]
Read = Callable[[Parameters, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def slots(weight_TM: Tensor, q: Tensor, k_TD: Tensor, v_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over slots that are means of the tokens, and the log of its denominator."""
    mean_MT = (weight_TM / weight_TM.sum(0)).T
    logits_M = mean_MT @ k_TD @ q / D**0.5
    return logits_M.softmax(0) @ mean_MT @ v_TD, logits_M.logsumexp(0)


def gsa(p: Parameters, q: Tensor, k_TD: Tensor, v_TD: Tensor, r: int) -> tuple[Tensor, Tensor]:
    a_TM = (torch.cat((k_TD, k_TD), 1) + p["gate_bias_GM"]).sigmoid() ** (1 / 16)
    later_TM = torch.stack([a_TM[t + 1 :].prod(0) for t in range(len(a_TM))])
    return slots((1 - a_TM) * later_TM, q, k_TD, v_TD)


def abc(p: Parameters, q: Tensor, k_TD: Tensor, v_TD: Tensor, r: int) -> tuple[Tensor, Tensor]:
    return slots((k_TD @ p["choice_GDM"]).softmax(0), q, k_TD, v_TD)


def means(weight_TD: Tensor, v_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each channel under weights of its own, and the log of the mean sum of weights."""
    mass_D = weight_TD.sum(0)
    return (weight_TD * v_TD).sum(0) / mass_D, mass_D.mean().log()


def mamba(p: Parameters, q: Tensor, k_TD: Tensor, v_TD: Tensor, r: int) -> tuple[Tensor, Tensor]:
    dt_TD = (1 + (k_TD + p["step_bias_GV"]).exp()).log()
    later_TD = dt_TD.flip(0).cumsum(0).flip(0) - dt_TD
    decay_TFD = (-later_TD[:, None] * p["log_rate_GFV"].exp()).exp()
    q_F, k_TF = (q @ p["q_map_HDF"][r]).softmax(0), (k_TD @ p["k_map_GDF"]).softmax(1)
    return means(dt_TD * torch.einsum("f,tf,tfd->td", q_F, k_TF, decay_TFD), v_TD)


def s4(p: Parameters, q: Tensor, k_TD: Tensor, v_TD: Tensor, r: int) -> tuple[Tensor, Tensor]:
    ago_T = torch.arange(len(v_TD)).flip(0)[:, None, None]
    decay_TFD = (-ago_T * p["log_rate_GFV"].exp()).exp()
    return means(torch.einsum("df,tfd->td", p["read_GVRF"][:, r].exp(), decay_TFD), v_TD)


EQUATIONS: dict[str, tuple[Read, dict[str, Any]]] = {
    "gsa": (gsa, {"slots": 2 * D, "gate_bias": 2.0}),
    "abc": (abc, {"slots": 5}),
    "mamba": (mamba, {}),
    "s4": (s4, {}),
}
every_mixer = pytest.mark.parametrize("name", EQUATIONS)


def started(spec: dict[str, Any]) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec(spec), HeadDims(32, H, G, D))
    mixer.reset_parameters()
    return mixer


def random_qkv(tokens: int) -> QKV:
    q, k, v = (torch.randn(1, tokens, heads, D) for heads in (H, G, G))
    return QKV(q, k, q, k, v, torch.arange(tokens)[None], torch.zeros(1, tokens, 32))


def metadata_of(tokens: int) -> SequenceMetadata:
    return SequenceMetadata.build(torch.empty(1, tokens), torch.arange(tokens)[None], None)


@every_mixer
@torch.no_grad()
def test_a_mixer_is_the_equation_of_its_paper(name: str) -> None:
    read, options = EQUATIONS[name]
    mixer, qkv, R = started({"type": name, "scope": "all", **options}), random_qkv(T), H // G
    for parameter in mixer.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    memory = mixer.remember(qkv, metadata_of(T), None)
    assert memory.log_normalizer_BTH is not None
    for h in range(H):
        g = h // R
        named = {key: p.detach().double() for key, p in mixer.named_parameters()}
        of_head = {key: p[g * R : (g + 1) * R] if "_H" in key else p[g] for key, p in named.items()}
        q_TD, k_TD, v_TD = (x[0].double() for x in (qkv.q_BTHD[:, :, h], qkv.k_BTGD[:, :, g], qkv.v_BSGD[:, :, g]))
        expected = [read(of_head, q_TD[t], k_TD[: t + 1], v_TD[: t + 1], h % R) for t in range(T)]
        o_TD, log_mass_T = (torch.stack(part) for part in zip(*expected))
        # T tokens of some ten roundings each, were they all to add up
        tolerance = 10 * T * torch.finfo(torch.float32).eps
        assert (memory.o_BTHV[0, :, h] - o_TD).norm() <= tolerance * o_TD.norm()
        assert (memory.log_normalizer_BTH[0, :, h] - log_mass_T).abs().max() <= tolerance * (1 + log_mass_T.abs().max())


@every_mixer
def test_a_new_memory_has_little_weight_beside_the_window(name: str) -> None:
    mixer, qkv, metadata = started({"type": name}), random_qkv(300), metadata_of(300)
    seen = chunk_swa(qkv.q_rot_BTHD, qkv.k_rot_BTGD, qkv.v_BSGD, window_size=64, scale=D**-0.5)
    memory = mixer.remember(qkv, metadata, None)
    both, _ = combine(*seen, *mixer.contribution(qkv.q_BTHD, memory))
    assert 0 < (both - seen[0]).norm() < 0.1 * seen[0].norm()


@pytest.mark.parametrize("name", ["gsa", "abc", "s4", "mamba"])
@pytest.mark.parametrize("scope", ["evicted", "all"])
def test_every_parameter_of_a_memory_gets_a_gradient(name: str, scope: str) -> None:
    mixer = started({"type": name, "scope": scope, "window": 5, "sinks": 1, "combine": "fixed"})
    (mixer.remember(random_qkv(T), metadata_of(T), None).o_BTHV ** 3).sum().backward()
    assert [key for key, p in mixer.named_parameters() if p.grad is None or not p.grad.any()] == []
