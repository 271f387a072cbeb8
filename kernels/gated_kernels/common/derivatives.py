"""Helpers for higher derivatives: differentiable backward passes, and functions whose derivatives stay finite at 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable_gradients(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Any], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of `run(*inputs)` for the output gradients `grads`: one for every input, or None for an
    input that needs none.

    For the backward pass of a `torch.autograd.Function` when gradients are enabled in it, as with `create_graph=True`.
    `run` must compute the same op with torch operations alone. Refusing with `once_differentiable` would not work:
    `torch.autograd.grad` may never reach the error node that it puts into the graph.
    """
    with torch.enable_grad():
        # views, so that the graph of an input that was computed from another input is not traversed
        own = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
        wanted = [mine for mine, x in zip(own, inputs) if mine is not x]
        found = iter(torch.autograd.grad(run(*own), wanted, grads, create_graph=True, allow_unused=True))
    return tuple(None if mine is x else next(found) for mine, x in zip(own, inputs))


def unit(x: Tensor) -> Tensor:
    """x divided by its length in the last dimension; vectors shorter than 1e-12 stay as they are.

    All derivatives are finite there, unlike the higher ones of `torch.nn.functional.normalize`.
    """
    square = x.square().sum(-1, keepdim=True)
    return x / square.masked_fill(square < 1e-24, 1).sqrt()


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """x [..., V] / y [...] for y > 0. Both are first multiplied by a power of 2 that brings y near 1, which is exact.

    Otherwise, the second derivative with respect to y, computed from 1 / y^2, would overflow float32 for y < 1e-19.
    """
    power = power_of_size(y)
    return (x * power[..., None]) / (y * power)[..., None]


def logarithm(x: Tensor) -> Tensor:
    """log x, scaled like `quotient`, so that second derivatives do not overflow."""
    power = power_of_size(x)
    return (x * power).log() - power.log()


def power_of_size(x: Tensor) -> Tensor:
    """The power of 2 whose product with x is in [1/2, 1). A constant to autograd."""
    return torch.ldexp(torch.ones_like(x), -torch.frexp(x.detach()).exponent)
