"""What derivatives beyond the first take: a backward pass of torch operations alone, and none that is NaN at 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable_gradients(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Any], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of `run(*inputs)` for `grads`, one for every input (None where it needs none), which can be
    differentiated in turn.

    For the backward pass of a `torch.autograd.Function` while gradients are enabled there, as they are with
    `create_graph=True`: `run` is the op once more, made of torch operations alone. `once_differentiable` would not do
    for a refusal, as `torch.autograd.grad` never comes by the error that it leaves in the graph.
    """
    with torch.enable_grad():
        # views, so that an input made of another one is not followed to that
        own = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
        wanted = [mine for mine, x in zip(own, inputs) if mine is not x]
        found = iter(torch.autograd.grad(run(*own), wanted, grads, create_graph=True, allow_unused=True))
    return tuple(None if mine is x else next(found) for mine, x in zip(own, inputs))


def unit(x: Tensor) -> Tensor:
    """x over its length in the last dimension; what is shorter than 1e-12 stays as it is.

    All its derivatives are finite there, unlike those of `torch.nn.functional.normalize` beyond the first.
    """
    square = x.square().sum(-1, keepdim=True)
    return x / square.masked_fill(square < 1e-24, 1).sqrt()


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """x [..., V] over y > 0 [...], both first brought to y's size by a power of 2, which rounds nothing.

    The second derivative by y, which goes with 1 / y^2, would overflow float32 where y is less than 1e-19.
    """
    power = power_of_size(y)
    return (x * power[..., None]) / (y * power)[..., None]


def logarithm(x: Tensor) -> Tensor:
    """log x, with derivatives as those of `quotient`."""
    power = power_of_size(x)
    return (x * power).log() - power.log()


def power_of_size(x: Tensor) -> Tensor:
    """A power of 2, a constant, that brings x between 1/2 and 1."""
    return torch.ldexp(torch.ones_like(x), -torch.frexp(x.detach()).exponent)
