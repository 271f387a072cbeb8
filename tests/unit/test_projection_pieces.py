"""The token shift is that of RWKV6, written out here one token and one channel after another.

Shapes: B batch, T tokens, C hidden size, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.projection_pieces import STATES, TokenShift, make_shift, shift_shapes
from liger_convert.mixers.short_convolution import RowPositions

B, T, C, H, G, D = 2, 13, 12, 4, 2, 3
DIMS = HeadDims(C, H, G, D)


def tokens() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, T, heads, D) for heads in (H, G, G)] + [torch.randn(B, T, C)]


def moved() -> TokenShift:
    shift = TokenShift(DIMS)
    shift.reset_parameters()
    with torch.no_grad():
        for parameter in shift.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return shift


def loop(shift: TokenShift, of_row: list[Tensor]) -> list[Tensor]:
    """q, k and v of one row [T,...] in float64."""
    p = {name: x.double() for name, x in shift.named_parameters()}
    q, k, v, x = (of_token.double() for of_token in of_row)
    projected, found = torch.cat([y.flatten(1) for y in (q, k, v)], 1), []
    for t in range(len(x)):
        before_x, before = (x[t - 1], projected[t - 1]) if t else (torch.zeros(C), torch.zeros(projected.shape[1]))
        z = x[t] + p["mu_C"] * (before_x - x[t])
        share = p["constant_Y"] + p["up_YL"] @ torch.tanh(p["down_LC"] @ z)
        found.append((1 - share) * projected[t] + share * before)
    parts = torch.stack(found).split([H * D, G * D, G * D], 1)
    return [part.view(of_token.shape) for part, of_token in zip(parts, (q, k, v))]


def error(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def test_the_token_shift_equals_the_papers_loop() -> None:
    shift, inputs = moved(), tokens()
    *got, _ = shift(*inputs, RowPositions(None, None), {})
    for b in range(B):
        expected = loop(shift, [x[b] for x in inputs])
        assert max(error(y[b], z) for y, z in zip(got, expected)) < 16 * torch.finfo(torch.float32).eps
    with torch.no_grad():
        shift.mu_C.zero_()
    assert max(error(y[0], z) for y, z in zip(got, loop(shift, [x[0] for x in inputs]))) > 1e-3, "the loop sees all"


def test_the_gradients_of_the_token_shift_are_those_of_the_loop() -> None:
    shift, inputs = moved(), [x.requires_grad_() for x in tokens()]
    leaves = {**dict(zip(("q", "k", "v", "x"), inputs, strict=True)), **dict(shift.named_parameters())}
    *got, _ = shift(*inputs, RowPositions(None, None), {})
    rows = [loop(shift, [x[b] for x in inputs]) for b in range(B)]
    expected = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    d = [torch.randn_like(y) for y in got]
    ours = torch.autograd.grad(got, list(leaves.values()), d)
    exact = torch.autograd.grad(expected, list(leaves.values()), [x.double() for x in d])
    for name, found, wanted in zip(leaves, ours, exact, strict=True):
        # sums over B * T tokens, each of which may round once
        assert error(found, wanted) < B * T * torch.finfo(torch.float32).eps, name


def test_no_shift_crosses_a_document_boundary_and_padding_is_skipped() -> None:
    shift, inputs = moved(), tokens()
    position_BT = torch.cat((torch.arange(5), torch.arange(T - 5))).expand(B, T)
    *packed, _ = shift(*inputs, RowPositions(None, position_BT), {})
    for piece in (slice(0, 5), slice(5, T)):
        *alone, _ = shift(*(x[:, piece] for x in inputs), RowPositions(None, None), {})
        assert all(torch.allclose(y[:, piece], z, atol=1e-6) for y, z in zip(packed, alone))
    real_BT = torch.ones(B, T, dtype=torch.bool)
    real_BT[:, 4:7] = False
    *padded, after = shift(*inputs, RowPositions(real_BT, None), {})
    *without, after_without = shift(*(x[:, real_BT[0]] for x in inputs), RowPositions(None, None), {})
    assert all(torch.allclose(y[:, real_BT[0]], z, atol=1e-6) for y, z in zip(padded, without))
    assert all(torch.allclose(after[name], after_without[name], atol=1e-6) for name in after)


@pytest.mark.parametrize("kind", ["key_value", "token"])
def test_a_new_shift_changes_nothing_and_its_states_have_the_declared_shapes(kind: str) -> None:
    shift = make_shift(kind, DIMS)  # type: ignore[arg-type]
    assert shift is not None
    shift.reset_parameters()
    q, k, v, x = tokens()
    *same, after = shift(q, k, v, x, RowPositions(None, None), {})
    assert all(torch.equal(*pair) for pair in zip(same, (q, k, v))), "a new shift must change nothing"
    assert {name: state.shape[1:] for name, state in after.items()} == shift_shapes(kind, DIMS)  # type: ignore[arg-type]
    assert set(after) <= set(STATES)
