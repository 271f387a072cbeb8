"""The short convolution, the norm and the gate around a mixture of memories, compared with a loop over tokens.

Shapes: T tokens, C hidden size, H query heads, G key-value heads, D head size (of values too), N memories.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from poison import poisoned_memory
from torch import Tensor

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, Mixer
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.utils.errors import BadInput

C, H, G, D, N, ACTIVE, TAPS = 16, 4, 2, 8, 3, 2, 3
WINDOW, SINKS = 5, 2
DOCUMENTS = (23, 1, 17)
T = sum(DOCUMENTS)
SAME = 1e-10  # relative; float64 rounding in sums of some thousand terms
PIECES: dict[str, Any] = {"short_conv": TAPS, "output_norm": "rms", "output_gate": True}
SPECS: list[dict[str, Any]] = [
    {"short_conv": TAPS},
    {"output_norm": "rms"},
    {"output_gate": True, "scope": "all"},
    {**PIECES, "router": "layer"},
    {**PIECES, "scope": "all", "shared": False},
]
INPUTS = ("q", "k", "v", "x")


_poisoned_memory = pytest.fixture(autouse=True)(poisoned_memory)


def moved(**spec: Any) -> Mixer:
    """A mixture of delta rules in float64, away from its start."""
    common = {"type": "mom", "combine": "fixed", "window": WINDOW, "sinks": SINKS, "memories": N, "active": ACTIVE}
    mixer = build_mixer(resolve_spec({**common, "inner": {"type": "deltanet"}, **spec}), HeadDims(C, H, G, D)).double()
    mixer.reset_parameters()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return mixer


def random_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, T, heads, D) for heads in (H, G, G)] + [(1, T, C)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def read(mixer: Mixer, inputs: list[Tensor]) -> Tensor:
    q, k, v, x = inputs
    metadata = SequenceMetadata.build(x, torch.cat([torch.arange(n) for n in DOCUMENTS])[None], None)
    return mixer.remember(QKV(q, k, q, k, v, metadata.position_BT, x), metadata, None).o_BTHV


def convolved(p: dict[str, Tensor], name: str, x_TD: Tensor, head: int) -> Tensor:
    """One head of one document."""
    weights = p.get(f"short_conv.{name}.weight_NDK")
    if weights is None:
        return x_TD
    return torch.stack(
        [sum(weights[head, :, -1 - j] * x_TD[t - j] for j in range(min(TAPS, t + 1))) for t in range(len(x_TD))]
    )


def loop(p: dict[str, Tensor], inputs: list[Tensor], spec: Any) -> Tensor:
    """The read [1,T,H,D], one token after another. Every memory is a delta rule."""
    q, k, v, x = (each[0] for each in inputs)
    heads = []
    for h in range(H):
        g, start, rows = h // (H // G), 0, []
        router = p["router_GNC"][g if spec.router == "head" else 0]
        for length in DOCUMENTS:
            of = slice(start, start + length)
            start += length
            queries, keys = convolved(p, "q", q[of, h], h), convolved(p, "k", k[of, g], g)
            values, logits = convolved(p, "v", v[of, g], g), x[of] @ router.T
            chosen = logits.argsort(dim=-1, descending=True, stable=True)[:, :ACTIVE].tolist()
            after = [[torch.zeros(D, D, dtype=torch.float64)] * (N + spec.shared)]
            for t in range(length):
                states = list(after[-1])
                for m in [m for m in range(N) if m in chosen[t]] + [N] * spec.shared:
                    if spec.scope == "all" or t >= SINKS:
                        u, b = keys[t] / keys[t].norm(), (k[of, g][t].mean() + p["inner.beta_bias_GX"][g]).sigmoid()
                        states[m] = states[m] + b * torch.outer(u, values[t] - u @ states[m])
                after.append(states)
            for t in range(length):
                states = after[max(t + 1 - (0 if spec.scope == "all" else WINDOW), 0)]
                weights = logits[t][chosen[t]].softmax(0)
                state = sum(weight * states[m] for weight, m in zip(weights, chosen[t], strict=True))
                if spec.shared:
                    state = state + states[N]
                o = queries[t] / queries[t].norm() @ state
                if spec.output_norm == "rms":
                    o = p["read_norm.size_HV"][h] * o / (o.square().mean() + 1e-6).sqrt()
                if spec.output_gate:
                    o = o * 2 / (1 + (-(p["read_gate.weight_EC"][h * D : (h + 1) * D] @ x[of][t])).exp())
                rows.append(o)
        heads.append(torch.stack(rows))
    return torch.stack(heads, 1)[None]


def differences(mixer: Mixer, spec: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the read and its gradients by all inputs and parameters, those that are not the loop's with `spec`."""
    inputs, p = random_inputs(), dict(mixer.named_parameters())
    leaves = {**dict(zip(INPUTS, inputs, strict=True)), **p}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # which mixers compute in
        found, expected = read(mixer, inputs), loop(p, inputs, spec)
        d = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        ours, exact = (torch.autograd.grad(o, list(leaves.values()), d) for o in (found, expected))
    both = zip(("read", *leaves), (found, *ours), (expected, *exact), strict=True)
    return [name for name, a, b in both if not (a - b).norm() <= SAME * b.norm()]


@pytest.mark.parametrize("options", SPECS, ids=str)
def test_a_mixture_with_its_papers_pieces_is_a_loop(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = moved(**options)
    assert differences(mixer, mixer.spec, monkeypatch) == []


@pytest.mark.parametrize("left_out", PIECES)
@torch.no_grad()
def test_the_loop_without_a_piece_differs(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, inputs = moved(**PIECES), random_inputs()
    p = dict(mixer.named_parameters())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    own = mixer.spec
    if left_out == "short_conv":
        p = {name: x for name, x in p.items() if "short_conv" not in name}
    else:
        own = replace(own, **{left_out: "none" if left_out == "output_norm" else False})
    found, exact, expected = (
        read(mixer, inputs),
        loop(dict(mixer.named_parameters()), inputs, mixer.spec),
        loop(p, inputs, own),
    )
    assert (found - exact).norm() <= SAME * exact.norm()
    assert (found - expected).norm() > 1e-3 * expected.norm()


def test_convolution_and_gate_start_as_the_identity_bit_for_bit() -> None:
    reads = []
    for pieces in ({}, {"short_conv": 4}, {"output_gate": True}, {"output_norm": "rms"}):
        torch.manual_seed(0)
        spec = {"type": "mom", "combine": "fixed", "window": WINDOW, "inner": {"type": "deltanet"}, **pieces}
        mixer = build_mixer(resolve_spec(spec), HeadDims(C, H, G, D))
        mixer.reset_parameters()
        with torch.no_grad():
            reads.append(read(mixer, [x.float() for x in random_inputs()]))
    assert torch.equal(reads[0], reads[1])
    assert torch.equal(reads[0], reads[2])
    assert not torch.equal(reads[0], reads[3])


def test_the_scale_of_a_mixtures_norm_is_calibrated() -> None:
    mixer = moved(output_norm="rms")
    assert mixer.read_norm is not None
    assert mixer.calibration().read_size is mixer.read_norm.size_HV
    assert moved().calibration().read_size is None


def test_pieces_that_a_mixture_cannot_have_are_refused() -> None:
    for inner, pieces, message in (
        ("gsa", {"short_conv": 4}, "short_conv: gsa takes no convolved keys; use 0, or another inner mixer"),
        ("retnet", {"short_conv": 4}, "short_conv: works on queries and keys before rotary; use inner.rope: false"),
        ("deltanet", {"short_conv": 1}, "short_conv: 1 is not from 2 to 16"),
        ("deltanet", {"output_norm": "layer"}, "output_norm: 'layer' is not allowed"),
        ("deltanet", {"inner": {"short_conv": 4}}, "inner.short_conv: runs before all memories; give short_conv next"),
        ("deltanet", {"inner": {"output_norm": "rms"}}, "inner.output_gate: like output_norm, it comes after all"),
    ):
        own = {"type": inner, **pieces.pop("inner", {})}
        with pytest.raises(BadInput) as refused:
            resolve_spec({"type": "mom", "combine": "learned", "inner": own, **pieces})
        assert str(refused.value).startswith(f"mixer.{message}")
