"""Every mixer over the diagonal recurrence against its equation, written out for one head as the paper has it; what its
options refuse; and how it starts.

Shapes: T tokens, D head size, F feature size, V value size; one head of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as nnf
from gated_kernels.check import error
from gated_kernels.swa.chunk import chunk_swa, combine
from tiny_models import build
from torch import Tensor

from liger_convert.mixers import MIXERS, build_mixer, make_spec, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, Mixer
from liger_convert.mixers.kernel_maps import MapName, make_map
from liger_convert.mixers.linear.base import GatedMixer, LinearMixer
from liger_convert.mixers.memory_logit import MemoryLogit
from liger_convert.model import head_dims
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.utils.errors import BadInput

DIMS = HeadDims(hidden=24, heads=6, kv_heads=2, dim=8)
T = 37
LINEAR = [name for name, cls in MIXERS.items() if issubclass(cls, LinearMixer)]


class Head(NamedTuple):
    """One query head and its key-value head in float64, and the mixer's parameters: `p(name)` is this head's row."""

    q: Tensor
    k: Tensor
    q_rot: Tensor
    k_rot: Tensor
    v: Tensor
    p: Callable[[str], Tensor]


def sum_of(write_TFV: Tensor, a_TFV: Tensor | float = 1.0) -> Tensor:
    """[T,F,V]: S_t = a_t S_{t-1} + write_t, a_t of any shape that broadcasts."""
    states, state = [], torch.zeros_like(write_TFV[0])
    for t, write in enumerate(write_TFV):
        state = (a_TFV[t] if isinstance(a_TFV, Tensor) else a_TFV) * state + write
        states.append(state)
    return torch.stack(states)


def outer(k_TF: Tensor, v_TV: Tensor) -> Tensor:
    return k_TF[:, :, None] * v_TV[:, None]


def contract(q_TF: Tensor, S_TFV: Tensor) -> Tensor:
    return torch.einsum("tf,tfv->tv", q_TF, S_TFV)


def mean(q_TF: Tensor, k_TF: Tensor, v_TV: Tensor, a: Tensor | float = 1.0) -> Tensor:
    """[T,V+1]: the weighted mean of values, and the sum of the weights behind it."""
    sums = contract(q_TF, sum_of(outer(k_TF, nnf.pad(v_TV, (0, 1), value=1.0)), a))
    return torch.cat((sums[:, :-1] / sums[:, -1:], sums[:, -1:]), 1)


def norm(h: Head, o_TV: Tensor) -> Tensor:
    return o_TV * (o_TV.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * h.p("size_HV")


def elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def parabola(h: Head, side: str) -> Tensor:
    x = h.q if side == "q" else h.k
    centred = x - x.mean(-1, keepdim=True)
    x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (h.p(f"{side}_map.gamma_ND") * x + h.p(f"{side}_map.beta_ND")).square() / 8**0.5


def arccos(h: Head, x: Tensor) -> Tensor:
    return (x / x.norm(dim=-1, keepdim=True) @ h.p("q_map.directions_FD").T).relu() / 8**0.5


def lightning(h: Head, g: int) -> Tensor:
    return norm(h, contract(h.q, sum_of(outer(h.k, h.v), float(torch.tensor(-(2.0 ** (-8 * (g + 1) / 2))).exp()))))


def retnet(h: Head, g: int) -> Tensor:
    return norm(h, contract(h.q_rot, sum_of(outer(h.k_rot, h.v), 1 - 2.0 ** (-5 - g))))


def gated_retention(h: Head, g: int) -> Tensor:
    a = (h.k.mean(-1) + h.p("gate_bias_GF")).sigmoid() ** (1 / 16)
    return norm(h, contract(h.q_rot, sum_of(outer(h.k_rot, h.v), a)))


def complex_(x_TF: Tensor) -> Tensor:
    return torch.complex(x_TF[:, 0::2], x_TF[:, 1::2])


def gateloop_state(h: Head) -> Tensor:
    """[T,F/2,V] in complex128."""
    a = (complex_(h.k).real + complex_(h.k).imag) / 2 + h.p("gate_bias_GF")
    a = torch.polar(a.sigmoid(), h.k @ h.p("phase_GDC"))
    return sum_of(outer(complex_(h.k).conj(), h.v.to(a.dtype)), a[..., None])


def gateloop(h: Head, g: int) -> Tensor:
    return norm(h, contract(complex_(h.q), gateloop_state(h)).real)


def real_gateloop(h: Head, g: int) -> Tensor:
    a = (h.k + h.p("gate_bias_GF")).sigmoid()
    return norm(h, contract(h.q, sum_of(outer(h.k, h.v), a[..., None])))


def hgrn2(h: Head, g: int) -> Tensor:
    a = 0.9 + 0.1 * (h.k + h.p("gate_bias_GF")).sigmoid()
    return norm(h, contract(h.q.softmax(-1), sum_of(outer(1 - a, h.v), a[..., None])))


def mamba2(h: Head, g: int) -> Tensor:
    dt = (1 + (h.k.mean(-1) + h.p("gate_bias_GF")).exp()).log()
    a = (-h.p("log_A_G1").exp() * dt).exp()
    return norm(h, contract(h.q, sum_of(outer(dt[:, None] * h.k, h.v), a)))


def mlstm(h: Head, g: int) -> Tensor:
    """With the running maximum that the paper carries, which must cancel."""
    pooled = h.k.mean(-1)
    log_f = (pooled + h.p("gate_bias_GF")).sigmoid().log()
    log_i = 15 * ((pooled + h.p("input_bias_GF")) / 15).tanh()
    S, n, m = torch.zeros(8, 8).double(), torch.zeros(8).double(), torch.tensor(0.0).double()
    outputs = []
    for t in range(T):
        before, m = m, torch.maximum(log_f[t] + m, log_i[t])
        keep, put, k = (log_f[t] + before - m).exp(), (log_i[t] - m).exp(), h.k[t] / 8**0.5
        S, n = keep * S + put * k[:, None] * h.v[t], keep * n + put * k
        outputs.append(h.q[t] @ S / torch.maximum((h.q[t] @ n).abs(), (-m).exp()))
    return norm(h, torch.stack(outputs))


def rwkv6(h: Head, g: int) -> Tensor:
    a = (-(h.k + h.p("gate_bias_GF")).exp()).exp()
    kv = outer(h.k, h.v)
    before = torch.cat((torch.zeros_like(kv[:1]), sum_of(kv, a[..., None])[:-1]))
    return norm(h, contract(h.q, before + h.p("bonus_GF")[:, None] * kv))


def decaying_fast_weights(h: Head, g: int) -> Tensor:
    a = (h.k + h.p("gate_bias_GF")).sigmoid()
    b = (h.k.unflatten(-1, (4, 2)).mean(-1) + h.p("value_bias_GF")).sigmoid().repeat_interleave(2, 1)
    return norm(h, contract(h.q, sum_of(outer(h.k, h.v), outer(a, b))))


def gated_rfa(h: Head, g: int) -> Tensor:
    gate = (h.k.mean(-1) + h.p("gate_bias_GF")).sigmoid()
    return mean(arccos(h, h.q), (1 - gate)[:, None] * arccos(h, h.k), h.v, gate)


EQUATIONS: dict[str, Callable[[Head, int], Tensor]] = {
    "linear-attention": lambda h, g: mean(elu1(h.q), elu1(h.k) / 8, h.v),
    "rebased": lambda h, g: mean(parabola(h, "q"), parabola(h, "k"), h.v),
    "lightning": lightning,
    "retnet": retnet,
    "gated-retention": gated_retention,
    "gateloop": gateloop,
    "hgrn2": hgrn2,
    "mamba2": mamba2,
    "mlstm": mlstm,
    "rwkv6": rwkv6,
    "decaying-fast-weights": decaying_fast_weights,
    "gated-rfa": gated_rfa,
}


REAL_GATELOOP = {"type": "gateloop", "phase": False}


def random_qkv(tokens: int, seed: int = 0) -> QKV:
    generator = torch.Generator().manual_seed(seed)
    q, q_rot = (torch.randn(1, tokens, DIMS.heads, DIMS.dim, generator=generator) for _ in range(2))
    k, k_rot, v = (torch.randn(1, tokens, DIMS.kv_heads, DIMS.dim, generator=generator) for _ in range(3))
    positions = torch.arange(tokens)[None]
    return QKV(q, k, q_rot, k_rot, v, positions, torch.zeros(1, tokens, DIMS.hidden))


def metadata_of(tokens: int) -> SequenceMetadata:
    return SequenceMetadata.build(torch.empty(1, tokens), torch.arange(tokens)[None], None)


def started(spec: dict[str, Any]) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec(spec), DIMS)
    mixer.reset_parameters()
    return mixer


def one_head(mixer: Mixer, qkv: QKV, h: int) -> tuple[Head, int]:
    g = h * DIMS.kv_heads // DIMS.heads
    named = {name: p.detach().double() for name, p in mixer.named_parameters()}

    def p(name: str) -> Tensor:
        if name.endswith("_FD"):
            return named[name]
        return named[name][h if "_H" in name or name.startswith("q_map") else g]

    q, q_rot = qkv.q_BTHD[0, :, h], qkv.q_rot_BTHD[0, :, h]
    k, k_rot, v = qkv.k_BTGD[0, :, g], qkv.k_rot_BTGD[0, :, g], qkv.v_BSGD[0, :, g]
    return Head(*(x.double() for x in (q, k, q_rot, k_rot, v)), p), g


GATED = [name for name in LINEAR if issubclass(MIXERS[name], GatedMixer)]


@pytest.mark.parametrize("name", GATED)
def test_a_learned_gate_starts_as_the_pooled_one_and_all_of_it_is_trained(name: str) -> None:
    qkv, outputs = random_qkv(T), []
    pooled = {"feature_map": "hedgehog", "gate": "pooled"} if name == "gla" else {}  # codes are no channels of keys
    for options in (pooled, {**pooled, "gate": "learned"}):
        mixer = started({"type": name, "window": 5, **options})
        outputs.append(mixer.remember(qkv, metadata_of(T), None).o_BTHV)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-6)
    (outputs[1] ** 3).sum().backward()
    assert all(p.grad is not None and p.grad.any() for key, p in mixer.named_parameters() if "_pool_" in key)


@torch.no_grad()
def test_a_pooled_gate_of_a_code_is_the_mean_of_the_channels_that_the_code_reads() -> None:
    mixer, qkv = started({"gate": "pooled", "codes": 5}), random_qkv(T)
    book = mixer.codebook
    book.k_turn_GDE.normal_()
    mixer.gate_bias_GF.normal_()
    log_a_BTGF = mixer.log_gate(mixer.deferred_inputs(qkv))
    for g in range(DIMS.kv_heads):
        for f, code in enumerate(book.codes_GFE[g].double()):
            direction = book.k_turn_GDE[g].double() @ code
            weight = direction**2 / (direction @ direction)
            logit = qkv.k_BTGD[0, :, g].double() @ weight + mixer.gate_bias_GF[g, f].double()
            expected = (1 + (-logit).exp()).log() / -16
            torch.testing.assert_close(log_a_BTGF[0, :, g, f].double(), expected, rtol=1e-4, atol=1e-7)


@torch.no_grad()
def test_codes_that_read_all_channels_alike_share_the_gate_of_their_head() -> None:
    mixer, head, qkv = started({"gate": "pooled"}), started({"gate": "head"}), random_qkv(T)
    inputs = mixer.deferred_inputs(qkv)
    assert (mixer.log_gate(inputs) - head.log_gate(inputs)).abs().max() > 1e-4
    mixer.codebook.k_turn_GDE.fill_(1.0)
    torch.testing.assert_close(mixer.log_gate(inputs), head.log_gate(inputs).expand(-1, -1, -1, 256))


@torch.no_grad()
def moved(spec: dict[str, Any]) -> Mixer:
    mixer = started({"scope": "all", "sinks": 0, **spec})
    generator = torch.Generator().manual_seed(1)
    for key, parameter in mixer.named_parameters():
        if "gate_bias" in key:  # to gates that forget within the few tokens
            parameter.fill_(1.0 if parameter.mean() > 0 else -1.0)
        parameter += torch.randn(parameter.shape, generator=generator) * 0.5
    return mixer


@pytest.mark.parametrize(
    ("spec", "equation"),
    [*(({"type": name}, equation) for name, equation in EQUATIONS.items()), (REAL_GATELOOP, real_gateloop)],
    ids=[*EQUATIONS, "gateloop, real"],
)
@torch.no_grad()
def test_a_mixer_computes_its_papers_equation(spec: dict[str, Any], equation: Callable[[Head, int], Tensor]) -> None:
    mixer, qkv = moved(spec), random_qkv(T)
    memory = mixer.remember(qkv, metadata_of(T), None)
    for h in range(DIMS.heads):
        expected = equation(*one_head(mixer, qkv, h))
        got = memory.o_BTHV[0, :, h]
        if memory.log_normalizer_BTH is not None:
            got = torch.cat((got, memory.log_normalizer_BTH[0, :, h, None].exp()), 1)
        assert got.shape == expected.shape
        # both are float32 but for the loop: a few roundings of T sums, none of them of a difference that vanishes
        torch.testing.assert_close(got.double(), expected, rtol=2e-4, atol=2e-5)


@torch.no_grad()
def test_a_complex_state_is_carried_on_and_read_before_it_turns() -> None:
    mixer, qkv, segment_ids_BT = moved({"type": "gateloop"}), random_qkv(T), None
    assert isinstance(mixer, LinearMixer)
    entries, states, cuts, outputs = mixer.write(mixer.deferred_inputs(qkv), qkv.v_BSGD), {}, (0, 1, 12, 13, T), []
    for start, end in pairwise(cuts):
        part = qkv._replace(q_BTHD=qkv.q_BTHD[:, start:end])
        memory, states = mixer.scan(
            part, tuple(x[:, start:end] for x in entries), states, segment_ids_BT, exclusive=True
        )
        outputs.append(memory.o_BTHV)
    for h in range(DIMS.heads):
        head, g = one_head(mixer, qkv, h)
        S = gateloop_state(head)
        expected = norm(head, contract(complex_(head.q)[1:], S[:-1]).real)
        torch.testing.assert_close(torch.cat(outputs, 1)[0, 1:, h].double(), expected, rtol=2e-4, atol=2e-5)
        state = complex_(states["state"][0, g].double().mT).mT
        torch.testing.assert_close(state, S[-1].conj(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("scope", ["evicted", "all"])
def test_every_parameter_of_a_memory_gets_a_gradient(name: str, scope: str) -> None:
    mixer = started({"type": name, "scope": scope, "window": 5, "sinks": 1})
    qkv = random_qkv(T)
    qkv.v_BSGD.requires_grad_()  # linear attention has no parameter of its own
    memory = mixer.remember(qkv, metadata_of(T), None)
    (memory.o_BTHV**3).sum().backward()
    without = [key for key, parameter in mixer.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert set(without) <= {"mix_H", "log_share_H", "share_power_H", "share_query_HD"}  # which their combination uses


def test_every_mixer_over_linear_attention_has_its_equation_here() -> None:
    assert set(EQUATIONS) == set(LINEAR) - {"gla"}


@pytest.mark.parametrize("kernel", ["gaussian", "arccos"])
def test_random_features_estimate_their_kernel(kernel: MapName) -> None:
    torch.manual_seed(0)
    phi = make_map(kernel, 1, 1024)
    phi.reset_parameters()
    q, k = nnf.normalize(torch.randn(2, 1, 5, 1, 1024), dim=-1).unbind()
    angle = (q * k).sum(-1).arccos()
    exact = {
        "gaussian": (-(q - k).square().sum(-1) / 2).exp(),
        "arccos": (angle.sin() + (torch.pi - angle) * angle.cos()) / torch.pi,
    }[kernel]
    # each of the F draws deviates by less than 1 for x nearly at right angles: five deviations of their mean
    assert ((phi(q) * phi(k)).sum(-1) - exact).abs().max() < 5 / 2048**0.5


def test_products_give_the_square_of_the_product() -> None:
    phi = make_map("products", 1, 7)
    phi.reset_parameters()
    q, k = torch.randn(2, 1, 5, 1, 7, generator=torch.Generator().manual_seed(0)).unbind()
    product = (nnf.layer_norm(q, (7,)) * nnf.layer_norm(k, (7,))).sum(-1) / 7
    torch.testing.assert_close((phi(q) * phi(k)).sum(-1), product.square())


@pytest.mark.parametrize("name", [name for name in LINEAR if name not in ("lightning", "retnet")])
def test_a_new_memory_lasts_for_hundreds_of_tokens(name: str) -> None:
    mixer, qkv = started({"type": name}), random_qkv(300)
    assert isinstance(mixer, LinearMixer)
    mean_log_a = mixer.log_gate(mixer.deferred_inputs(qkv)).mean()
    assert -mean_log_a < math.log(2) / 200


@pytest.mark.parametrize("name", LINEAR)
def test_a_new_memory_has_little_weight_beside_the_window(name: str) -> None:
    mixer, qkv, metadata = started({"type": name}), random_qkv(300), metadata_of(300)
    window_o, lse = chunk_swa(qkv.q_rot_BTHD, qkv.k_rot_BTGD, qkv.v_BSGD, window_size=64, scale=DIMS.dim**-0.5)
    memory = mixer.remember(qkv, metadata, None)
    both, _ = combine(window_o, lse, *mixer.contribution(qkv.q_BTHD, memory))
    assert (both - window_o).norm() < 0.1 * window_o.norm()


@pytest.mark.parametrize("name", [name for name in LINEAR if MIXERS[name].Spec().combine == "learned"])
def test_an_unnormalized_memory_refuses_the_shared_denominator(name: str) -> None:
    with pytest.raises(BadInput, match=r"^mixer\.combine: shared needs (the memory's|a) normalizer"):
        resolve_spec({"type": name, "combine": "shared"})


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"type": "linear-attention", "feature_map": "identity"}, "feature_map"),
        ({"type": "gateloop", "feature_map": "products", "phase": False}, "gate"),
        ({"type": "gateloop", "feature_map": "codebook", "codes": 7, "gate": "head"}, "phase"),
        ({"type": "gateloop", "feature_map": "softmax", "normalize": True}, "normalize"),
        ({"gate": "learned"}, "gate"),
        ({"type": "hgrn2", "feature_map": "codebook"}, "gate"),
        ({"type": "lightning", "slope": -1.0}, "slope"),
        ({"type": "gated-retention", "gate_normalizer": 0.0}, "gate_normalizer"),
        ({"type": "gated-retention", "gate": "pooled"}, "gate"),
        ({"type": "hgrn2", "lower_bound": 1.0}, "lower_bound"),
        ({"type": "hgrn2", "rope": True}, "rope"),
        ({"type": "mlstm", "cap": 16.0}, "cap"),
        ({"type": "decaying-fast-weights", "value_gates": 3}, "value_gates"),
        ({"type": "decaying-fast-weights", "normalize": True, "feature_map": "relu"}, "normalize"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_by_name(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=rf"^mixer\.{field}: "):
        resolve_spec(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_of_a_share_are_those_of_its_formula(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    H, D = 5, 12
    inputs = [normal(2, 67, H, D).to(dtype), normal(2, 67, H), normal(H, D), normal(H), normal(H)]
    d_BTH = normal(2, 67, H)

    def formula(q: Tensor, log_mass: Tensor, query: Tensor, power: Tensor, beta: Tensor) -> Tensor:
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        return power * log_mass + (q * query).sum(-1) / D**0.5 + beta

    def results(op: Any, computed_in: torch.dtype | None = None) -> list[Tensor]:
        leaves = [x.to(computed_in or x.dtype, copy=True).requires_grad_() for x in inputs]
        found = op(*leaves)
        return [found.detach(), *torch.autograd.grad(found, leaves, d_BTH.to(found.dtype))]

    found = results(MemoryLogit.apply)
    for ours, plain, exact in zip(found, results(formula), results(formula, torch.float64)):
        assert ours.dtype == plain.dtype
        assert error(ours, exact) <= 2 * error(plain, exact) + 4 * torch.finfo(torch.float32).eps
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(*pair) for pair in zip(results(MemoryLogit.apply), found))


@pytest.mark.parametrize("name", ["gla", "decaying-fast-weights"])
def test_a_state_over_a_codebook_has_the_size_that_a_plan_counts(name: str) -> None:
    spec = {"type": name, "window": 5, "sinks": 2, "feature_map": "codebook", "codes": 16, "gate": "head"}
    model = build("llama", ["main", "softmax", "softmax"], **spec)
    with torch.no_grad():
        cache = model(torch.arange(3, 40)[None], use_cache=True).past_key_values
    counted = MIXERS[name].cached_states(make_spec(resolve_spec(spec)), head_dims(model.config))
    assert {name: tuple(state.shape[1:]) for name, state in cache.layers[0].states.items()} == counted
