"""A short convolution before a memory is its sum over the tokens of a document, starts as the identity, and is the same
in pieces.

Shapes: B batch, T tokens, K taps, N heads of any kind, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_convert.mixers import MIXERS, build_mixer, make_spec, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, Mixer
from liger_convert.mixers.short_convolution import RowPositions, ShortConvolution
from liger_convert.mixers.spec import ShortConvSpec
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.utils.errors import BadInput

B, T, K, N, D = 2, 19, 4, 3, 5
H, G = 4, 2
DIMS = HeadDims(hidden=32, heads=H, kv_heads=G, dim=8)
CONVOLVED = [name for name, mixer in MIXERS.items() if issubclass(mixer.Spec, ShortConvSpec)]
NONE = RowPositions(None, None)
EPS = torch.finfo(torch.float32).eps


def loop(x_BTND: Tensor, weight_NDK: Tensor, real_BT: Tensor, document_BT: Tensor) -> Tensor:
    """One row and one token after another."""
    rows = []
    for x_TND, real_T, document_T in zip(x_BTND, real_BT, document_BT):
        outputs = []
        for t in range(len(x_TND)):
            seen = [s for s in range(t, -1, -1) if real_T[s] and document_T[s] == document_T[t]]
            y_ND = torch.zeros_like(x_TND[0])
            for back, s in enumerate(seen[: weight_NDK.shape[-1]] if real_T[t] else []):
                y_ND = y_ND + weight_NDK[..., -1 - back] * x_TND[s]
            outputs.append(y_ND)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def convolution(taps: int = K, moved: bool = True) -> ShortConvolution:
    torch.manual_seed(0)
    module = ShortConvolution(taps, N, D)
    module.reset_parameters()
    with torch.no_grad():
        module.weight_NDK += torch.randn_like(module.weight_NDK) * moved
    return module


ALL = torch.ones(B, T, dtype=torch.bool)
LEFT = torch.arange(T) >= torch.tensor([[7], [0]])
AMONG = ALL.clone()
AMONG[0, 3], AMONG[0, 5:9], AMONG[1, 0], AMONG[1, -2:] = False, False, False, False
ONE = torch.zeros(B, T, dtype=torch.long)
PACKED = torch.stack([torch.arange(T) >= 2, torch.arange(T) >= 11]).long() + (torch.arange(T) >= 12)
ROWS = {"plain": (ALL, ONE), "padded left": (LEFT, ONE), "padded among": (AMONG, ONE), "packed": (ALL, PACKED)}


def row_of(real_BT: Tensor, document_BT: Tensor, start: int = 0, end: int = T) -> RowPositions:
    begins_BT = torch.cat((torch.ones(B, 1, dtype=torch.bool), document_BT.diff(dim=1) != 0), 1)
    at_T = torch.arange(T)
    position_BT = at_T - torch.where(begins_BT, at_T, 0).cummax(1).values
    return RowPositions(
        None if real_BT.all() else real_BT[:, start:end], position_BT[:, start:end] if document_BT.any() else None
    )


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("taps", [2, K])
def test_outputs_and_gradients_equal_the_sum_over_a_documents_tokens(kind: str, taps: int) -> None:
    real_BT, document_BT = ROWS[kind]
    module, x, d = convolution(taps), torch.randn(B, T, N, D), torch.randn(B, T, N, D)
    d = d * real_BT[..., None, None]
    ours = x.masked_fill(~real_BT[..., None, None], torch.nan).requires_grad_()
    y, _ = module(ours, None, row_of(real_BT, document_BT))
    exact = x.double().requires_grad_(), module.weight_NDK.detach().double().requires_grad_()
    expected = loop(*exact, real_BT, document_BT)
    found = [y[real_BT], *torch.autograd.grad(y, (ours, module.weight_NDK), d)]
    wanted = [expected[real_BT], *torch.autograd.grad(expected, exact, d.double())]
    for name, got, want in zip(("y", "x", "weight"), found, wanted):
        assert (got - want).abs().max() <= T * EPS * want.abs().max(), name


@pytest.mark.parametrize("kind", ["plain", "padded left", "padded among"])
@pytest.mark.parametrize("size", [1, 3, 7])
@torch.no_grad()
def test_chunks_equal_one_pass_and_padding_changes_no_state(kind: str, size: int) -> None:
    real_BT, document_BT = ROWS[kind]
    module, x = convolution(), torch.randn(B, T, N, D)
    whole, last = module(x, None, row_of(real_BT, document_BT))
    parts, state = [], None
    for start, end in pairwise((*range(0, T, size), T)):
        y, state = module(x[:, start:end], state, row_of(real_BT, document_BT, start, end))
        parts.append(y)
    assert torch.equal(torch.cat(parts, 1)[real_BT], whole[real_BT])
    assert state is not None
    assert torch.equal(state, last)
    for b in range(B):
        assert torch.equal(state[b], x[b, real_BT[b]][1 - K :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_starts_as_the_identity_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(B, T, N, D, dtype=dtype)
    y, state = convolution(moved=False)(x, None, NONE)
    assert torch.equal(y, x)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    other, _ = convolution(moved=True)(x, None, NONE)
    assert not torch.equal(other, x)


def test_a_state_does_not_keep_the_prompt_in_memory() -> None:
    _, state = convolution()(torch.randn(1, 500, N, D), None, NONE)
    assert state.untyped_storage().nbytes() == 4 * (K - 1) * N * D


# --- in mixers


def random_qkv(tokens: int) -> QKV:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, tokens, heads, 8, generator=generator) for heads in (H, G, G))
    return QKV(q, k, q, k, v, torch.arange(tokens)[None], torch.zeros(1, tokens, 32))


def metadata_of(tokens: int) -> SequenceMetadata:
    return SequenceMetadata.build(torch.empty(1, tokens), torch.arange(tokens)[None], None)


def before_rotary(name: str) -> dict[str, Any]:
    """The options with which this mixer's memory uses queries and keys before rotary."""
    return {"rope": False} if "rope" in {option.name for option in fields(MIXERS[name].Spec)} else {}


def started(spec: dict[str, Any]) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec({**before_rotary(spec["type"]), **spec}), DIMS)
    mixer.reset_parameters()
    return mixer


@torch.no_grad()
def moved(mixer: Mixer) -> Mixer:
    generator = torch.Generator().manual_seed(1)
    for parameter in mixer.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return mixer


@pytest.mark.parametrize("scope", ["evicted", "all"])
@pytest.mark.parametrize("name", CONVOLVED)
def test_a_new_convolution_does_not_change_the_memory_and_every_tap_gets_a_gradient(name: str, scope: str) -> None:
    spec, qkv = {"type": name, "scope": scope, "window": 5, "sinks": 1}, random_qkv(T)
    plain, mixer = started(spec), started({**spec, "short_conv": K})
    memory = mixer.remember(qkv, metadata_of(T), None).o_BTHV
    without = plain.remember(qkv, metadata_of(T), None).o_BTHV
    assert torch.equal(memory, without)
    assert {key for key, _ in mixer.named_parameters()} - {key for key, _ in plain.named_parameters()} == {
        f"short_conv.{x}.weight_NDK" for x in "qkv"
    }
    (memory**3).sum().backward()
    for x in "qkv":
        gradient = mixer.get_parameter(f"short_conv.{x}.weight_NDK").grad
        assert gradient is not None
        assert gradient.flatten(0, 1).any(0).all(), f"a tap of {x} learns nothing"
    assert mixer.short_conv is not None
    with torch.no_grad():
        mixer.short_conv.k.weight_NDK[..., 0] += 0.5
    assert not torch.equal(mixer.remember(qkv, metadata_of(T), None).o_BTHV, without)


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def delta_states(p: dict[str, Tensor], raw_TD: Tensor, k_TD: Tensor, v_TD: Tensor, written: list[bool]) -> list[Tensor]:
    """Gated DeltaNet: strengths and gates come from the keys as they are, and the convolved keys are written."""
    S, states = torch.zeros(8, 8, dtype=torch.float64), []
    for raw, k, v, is_written in zip(raw_TD, k_TD, v_TD, written):
        if is_written:
            u, beta = unit(k), (raw.mean() + p["beta_bias_GX"]).sigmoid()
            S = S / (1 + (raw.mean() + p["gate_bias_G1"]).exp())
            S = S - beta * u.outer(u) @ S + beta * u.outer(v)
        states.append(S)
    return states


@pytest.mark.parametrize("scope", ["evicted", "all"])
@torch.no_grad()
def test_gated_deltanet_with_it_is_the_papers(scope: str) -> None:
    window, sinks = 5, 2
    spec = {"type": "gated-deltanet", "gate_bias": -2.0, "short_conv": K, "scope": scope}
    mixer, qkv = moved(started({**spec, "window": window, "sinks": sinks})), random_qkv(T)
    memory = mixer.remember(qkv, metadata_of(T), None).o_BTHV
    named = {name: p.double() for name, p in mixer.named_parameters()}
    real, one = torch.ones(1, T, dtype=torch.bool), torch.zeros(1, T)
    q, k, v = (
        loop(x.double(), named[f"short_conv.{name}.weight_NDK"], real, one)[0]
        for name, x in zip("qkv", (qkv.q_BTHD, qkv.k_BTGD, qkv.v_BSGD))
    )
    delay = window if scope == "evicted" else 0
    written = [scope == "all" or t >= sinks for t in range(T)]  # sinks are not written, but convolved
    for h in range(H):
        g = h // (H // G)
        p = {name: x[g] for name, x in named.items() if name in ("beta_bias_GX", "gate_bias_G1")}
        states = delta_states(p, qkv.k_BTGD[0, :, g].double(), k[:, g], v[:, g], written)
        zero = torch.zeros(8, dtype=torch.float64)
        expected = torch.stack([unit(q[t, h]) @ states[t - delay] if t >= delay else zero for t in range(T)])
        assert (memory[0, :, h] - expected).norm() <= 10 * T * EPS * expected.norm()


@torch.no_grad()
def test_mamba_makes_its_steps_of_convolved_keys_and_mamba2_of_keys_as_they_are() -> None:
    for name, steps_of_convolved in (("mamba", True), ("mamba2", False)):
        mixer, qkv = moved(started({"type": name, "short_conv": K, "scope": "all"})), random_qkv(T)
        k, kc, v = qkv.k_BTGD, qkv.k_BTGD.roll(1, 1), qkv.v_BSGD
        entries, of_convolved, of_raw = mixer.write((k, kc), v), mixer.write((kc,), v), mixer.write((k,), v)
        same = [[torch.equal(*pair) for pair in zip(entries, other)] for other in (of_convolved, of_raw)]
        assert same == (
            [[True] * 3, [False] * 3] if steps_of_convolved else [[False, True, False], [False, True, True]]
        )


def test_options_that_cannot_have_a_short_convolution_are_refused() -> None:
    for spec, field in (
        ({"type": "deltanet", "short_conv": 1}, "short_conv"),
        ({"type": "deltanet", "short_conv": -4}, "short_conv"),
        ({"type": "deltanet", "short_conv": 400}, "short_conv"),
        ({"type": "deltanet", "short_conv": 4, "rope": True}, "short_conv"),
        ({"type": "retnet", "short_conv": 4}, "short_conv"),
        ({"type": "kda", "conv_bias": True}, "conv_bias"),
        ({"type": "s4", "short_conv": 4}, "short_conv"),
        ({"type": "mom", "inner": {"type": "deltanet", "short_conv": 4}, "combine": "learned"}, "inner.short_conv"),
        ({"type": "mom", "inner": {"type": "rwkv6", "token_shift": True}, "combine": "learned"}, "inner.token_shift"),
    ):
        with pytest.raises(BadInput, match=rf"^mixer\.{field}: "):
            resolve_spec(spec)


@pytest.mark.parametrize("name", CONVOLVED)
def test_the_states_of_the_convolution_are_counted(name: str) -> None:
    spec, cls = (
        resolve_spec({"type": name, "short_conv": K, **before_rotary(name)}),
        MIXERS[name],
    )
    added = cls.cached_states(make_spec(spec), DIMS).items() - cls.state_shape(make_spec(spec), DIMS).items()
    assert dict(added) == {"conv_q": (3, H, 8), "conv_k": (3, G, 8), "conv_v": (3, G, 8)}
    off = make_spec({**spec, "short_conv": 0})
    assert cls.cached_states(off, DIMS) == cls.state_shape(off, DIMS)
    assert math.prod(dict(added)["conv_q"]) == 3 * 8 * H


def test_a_mixer_with_a_short_convolution_has_no_fused_step() -> None:
    mixers = {taps: build_mixer(resolve_spec({"type": "gla", "short_conv": taps}), DIMS) for taps in (0, K)}
    assert mixers[0].step_config() is not None
    assert mixers[K].step_config() is None
