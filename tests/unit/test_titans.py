"""Titans' persistent tokens, and its memory as a gate and as context, compared with float64 loops of the whole layer.

Shapes: T tokens, C hidden size, H query heads, G key-value heads, D head size (of values too), N pairs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from poison import poisoned_memory
from tiny import save_tiny_base
from torch import Tensor

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.delta.titans import PersistentPairs, pair_logits
from liger_convert.mixers.window_attention import WindowInputs
from liger_convert.model.loading import linearize_base
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.utils.errors import BadInput

C, H, G, D = 32, 4, 2, 8
WINDOW, SINKS = 5, 2
DOCUMENTS = (23, 1, 17)
T = sum(DOCUMENTS)
EPS = torch.finfo(torch.float32).eps

SPECS: list[dict[str, Any]] = [
    {"persistent": 3},
    {"persistent": 1, "combine": "fixed", "scope": "all"},
    {"combine": "gate"},
    {"combine": "gate", "scope": "all", "sinks": 0},
    {"combine": "context"},
    {"combine": "context", "scope": "all", "persistent": 2},
    {"combine": "gate", "persistent": 7, "window": 1, "sinks": 0},
]
OF_RECURRENCE = ("beta_bias_GX", "momentum_bias_G1", "gate_bias_G1")
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


_poisoned_memory = pytest.fixture(autouse=True)(poisoned_memory)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"), tokenizer=False)


def model_of(base: Path, **spec: Any) -> Any:
    resolved = resolve_spec({"window": WINDOW, "sinks": SINKS, **spec})
    plan = {"format": 2, "mixers": {"main": resolved}, "layers": ["main"] * 3}
    return linearize_base(base, plan, dtype=torch.float32, attn_implementation="eager").eval()


def layer_of(base: Path, noise: float = 0.5, **spec: Any) -> tuple[Any, list[Tensor]]:
    """A layer, and inputs: q, k, q and k after rotary, and v; [1,T,heads,D]."""
    model = model_of(base, **{"type": "titans", "gate_bias": -2.0, **spec})
    attention = model.model.layers[1].self_attn
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.mixer.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    inputs = [torch.randn(1, T, heads, D, generator=generator) for heads in (H, G, H, G, G)]
    return attention, inputs


def output(attention: Any, inputs: list[Tensor]) -> Tensor:
    x_BTC, positions = torch.zeros(1, T, C), torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    metadata = SequenceMetadata.build(x_BTC, positions, None)
    qkv, window_inputs = attention.extend_window(tuple(inputs), x_BTC, metadata, None)
    return cast(Tensor, attention.mixer("prefill", qkv, window_inputs, metadata, None, attention.branches))


def memory(p: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, spec: Any, g: int) -> Tensor:
    """The read [T,D] of one head in one document."""
    M, Z = torch.zeros(D, D, dtype=q.dtype), torch.zeros(D, D, dtype=q.dtype)
    states = [M]
    for t in range(len(q)):
        if spec.scope == "all" or t >= spec.sinks:
            pooled, u = k[t].mean(), k[t] / k[t].norm()
            theta, eta = ((pooled + p[name][g]).sigmoid() for name in ("beta_bias_GX", "momentum_bias_G1"))
            kept = (pooled + p["gate_bias_G1"][g]).sigmoid().neg().add(1)
            Z = eta * Z - theta * torch.outer(u, u @ M - v[t])
            M = kept * M + Z
        states.append(M)
    delay = 0 if spec.scope == "all" else spec.window
    return torch.stack([q[t] / q[t].norm() @ states[max(t + 1 - delay, 0)] for t in range(len(q))])


def loop(p: dict[str, Tensor], inputs: list[Tensor], spec: Any) -> Tensor:
    """The layer's output [1,T,H,D] before its output projection, one query after another."""
    q, k, q_rot, k_rot, v = (x[0] for x in inputs)
    scale, heads = D**-0.5, []
    for h in range(H):
        g, start, rows = h // (H // G), 0, []
        for length in DOCUMENTS:
            of = slice(start, start + length)
            start += length
            read = memory(p, q[of, h], k[of, g], v[of, g], spec, g)
            for t in range(length):
                near = range(max(t - spec.window + 1, 0), t + 1)
                seen = [s for s in range(min(spec.sinks, t)) if s not in near] + list(near)
                weights = (k_rot[of, g][seen] @ q_rot[of, h][t] * scale).exp()
                sums = [weights @ v[of, g][seen], weights.sum()]
                if spec.persistent:
                    of_pairs = (p["persistent.k_GND"][g] @ q[of, h][t] * scale).exp()
                    signed = p["persistent.weight_HN"][h] * of_pairs
                    sums = [sums[0] + signed @ p["persistent.v_GNV"][g], sums[1] + signed.abs().sum()]
                if spec.combine == "context":
                    signed = p["context_weight_H1"][h] * (p["context_key_H1D"][h, 0] @ q[of, h][t] * scale).exp()
                    sums = [sums[0] + signed * read[t], sums[1] + signed.abs().sum()]
                y = sums[0] / sums[1]
                if spec.combine == "gate":
                    normed = read[t] / (read[t].square().mean() + 1e-6).sqrt()
                    y = y * 2 / (1 + (-p["gate_size_HV"][h] * normed).exp())
                elif spec.combine != "context":
                    share = p["mix_H"][h].sigmoid() if spec.combine == "learned" else 0.5
                    y = (1 - share) * y + share * read[t]
                rows.append(y)
        heads.append(torch.stack(rows))
    return torch.stack(heads, 1)[None]


def values_and_gradients(o: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    d = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, d)]


def in_dtype(attention: Any, inputs: list[Tensor], dtype: torch.dtype, spec: Any) -> list[Tensor]:
    """The loop's output and its gradients by all inputs and parameters, in this dtype."""
    p = {name: x.detach().to(dtype).requires_grad_() for name, x in attention.mixer.named_parameters()}
    own = [x.to(dtype).requires_grad_() for x in inputs]
    return values_and_gradients(loop(p, own, spec), [*own, *p.values()])


def relative_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@every_spec
def test_a_layer_is_its_loop_and_so_are_its_gradients(base: Path, spec: dict[str, Any]) -> None:
    attention, inputs = layer_of(base, **spec)
    ours = [x.clone().requires_grad_() for x in inputs]
    leaves = [*ours, *attention.mixer.parameters()]
    found = values_and_gradients(output(attention, ours), leaves)
    exact = in_dtype(attention, inputs, torch.float64, attention.spec)
    plain = relative_errors(in_dtype(attention, inputs, torch.float32, attention.spec), exact)
    names = ["output", "q", "k", "q_rot", "k_rot", "v", *(name for name, _ in attention.mixer.named_parameters())]
    for name, error, of_plain in zip(names, relative_errors(found, exact), plain, strict=True):
        # the op of the memory sums over T tokens in chunks, the loop one by one; each sum may round T times
        bound = T * EPS if name.endswith(OF_RECURRENCE) else 2 * max(of_plain, EPS)
        assert error <= bound, name


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        ({"persistent": 3}, {"persistent": 0}),
        ({"combine": "gate"}, {"combine": "context"}),
        ({"combine": "context"}, {"combine": "gate"}),
        ({"combine": "context", "scope": "all"}, {"scope": "evicted"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_loop_of_another_form_differs(base: Path, spec: dict[str, Any], other: dict[str, Any]) -> None:
    attention, inputs = layer_of(base, **spec)
    everything = layer_of(base, **{**spec, **other})[0].mixer.named_parameters()
    p = {name: x.double() for name, x in (*everything, *attention.mixer.named_parameters())}
    published = replace(attention.spec, **other)
    expected = loop(p, [x.double() for x in inputs], published)
    assert relative_errors([output(attention, inputs)], [expected])[0] > 1e-3


@pytest.mark.parametrize("name", ["learned", "fixed", "gate", "context"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_forms_start_as_the_window_alone_and_pairs_change_nothing(
    base: Path, name: str, dtype: torch.dtype
) -> None:
    tokens = torch.randint(3, 101, (2, T), generator=torch.Generator().manual_seed(0))
    plain, paired, window = (
        model_of(base, **spec).to(dtype)(tokens).logits
        for spec in (
            {"type": "titans", "combine": name},
            {"type": "titans", "combine": name, "persistent": 3},
            {"type": "window"},
        )
    )
    assert torch.equal(plain, paired)
    assert torch.equal(plain, window) == (name in ("gate", "context"))


@every_spec
def test_at_the_start_what_opens_a_piece_learns(base: Path, spec: dict[str, Any]) -> None:
    attention, inputs = layer_of(base, noise=0.0, **spec)
    output(attention, inputs).square().sum().backward()
    openers = {"persistent.weight_HN", "gate_size_HV", "context_weight_H1"}
    found = {name: p.grad for name, p in attention.mixer.named_parameters() if name in openers}
    assert found
    assert all(grad is not None and grad.ne(0).all() for grad in found.values())


@torch.no_grad()
def test_each_branch_can_be_switched_off(base: Path) -> None:
    for name in ("gate", "context"):
        attention, inputs = layer_of(base, combine=name, persistent=2)
        outputs = {}
        for attention.branches in ("both", "window", "memory"):
            outputs[attention.branches] = output(attention, inputs)
        learned = layer_of(base, combine="memory", persistent=2)[0]
        learned.mixer.load_state_dict(attention.mixer.state_dict(), strict=False)
        read = output(learned, inputs)
        attention.mixer.get_parameter("gate_size_HV" if name == "gate" else "context_weight_H1").zero_()
        attention.branches = "both"
        assert torch.equal(outputs["window"], output(attention, inputs))
        assert torch.equal(outputs["memory"].abs(), torch.zeros_like(read) if name == "gate" else read.abs())


@torch.no_grad()
def test_a_pair_has_no_position(base: Path) -> None:
    """Queries that differ only in how they are rotated give it the same logit, wherever they are."""
    attention, (q, k, q_rot, k_rot, v) = layer_of(base, persistent=2, window=1, sinks=0, combine="gate")
    attention.mixer.gate_size_HV.zero_()
    turned = [output(attention, [q, k, x, k_rot * 0, v]) for x in (q_rot, q_rot.flip(1))]
    assert torch.equal(*turned)


@torch.no_grad()
def test_pairs_far_above_the_window_and_queries_that_see_nothing_stay_finite() -> None:
    dims = HeadDims(C, H, G, D)
    pairs = PersistentPairs(2, dims)
    pairs.reset_parameters()
    pairs.weight_HN.fill_(1.0)
    lse_BTH = torch.tensor([-1e4, -torch.inf, 0.0])[None, :, None].expand(1, 3, H)
    o_BTHV, q_BTHD = torch.randn(1, 3, H, D), torch.randn(1, 3, H, D)
    inputs = WindowInputs(q_BTHD, q_BTHD, q_BTHD, None, None, cast(Any, None), 1, D**-0.5)
    found_BTHV, found_lse_BTH = pairs(q_BTHD, inputs, o_BTHV, lse_BTH)
    assert found_BTHV.isfinite().all()
    assert torch.equal(found_BTHV[:, 1], o_BTHV[:, 1])
    assert torch.equal(found_lse_BTH[:, 1], lse_BTH[:, 1])
    # nothing of the window is left beside such pairs
    assert (found_BTHV[:, 0] - pairs.v_GNV.repeat_interleave(H // G, 0).mean(1)).abs().max() <= 4 * EPS


def test_logits_of_pairs_are_capped_as_those_of_the_window() -> None:
    q_BTHD, k_GND = torch.randn(1, 3, H, D), 100 * torch.randn(G, 2, D)
    inputs = WindowInputs(q_BTHD, q_BTHD, q_BTHD, None, None, cast(Any, None), 1, 0.5, softcap=3.0)
    plain = torch.einsum("btgrd,gnd->btgrn", q_BTHD.unflatten(2, (G, -1)), k_GND).flatten(2, 3) * 0.5
    torch.testing.assert_close(pair_logits(q_BTHD, k_GND, inputs), 3 * (plain / 3).tanh())


def test_wrong_values_are_refused() -> None:
    for spec, message in (
        ({"type": "titans", "persistent": -1}, "persistent: -1 is negative; use 0 for none"),
        ({"type": "titans", "persistent": 1.5}, "persistent: 1.5 is not a value of type int"),
        ({"type": "titans", "combine": "shared"}, "combine: shared needs a normalizer"),
        ({"type": "titans", "combine": "layer"}, "combine: 'layer' is not allowed"),
        ({"type": "mom", "combine": "learned", "inner": {"type": "titans", "persistent": 2}}, "inner.persistent: "),
    ):
        with pytest.raises(BadInput) as refused:
            resolve_spec(spec)
        assert str(refused.value).startswith(f"mixer.{message}")


@pytest.mark.parametrize("name", sorted(set(MIXERS) - {"titans"}))
def test_no_other_mixer_takes_the_forms_of_titans(name: str) -> None:
    for form in ("gate", "context"):
        with pytest.raises(BadInput, match=r"^mixer\.(combine|scope): "):
            resolve_spec({"type": name, "combine": form})
