"""Checks an implementation of an op: its error against float64, compared with the naive one's in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor | None, ...]]
Inputs = dict[str, Any]


def run(op: Op, inputs: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every output, and the gradient of a random weighted sum of them with respect to every floating-point input."""
    leaves = {
        name: value.detach().to(dtype or value.dtype, copy=True).requires_grad_()
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    outputs = op(**inputs | leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(x for x in outputs if x is not None)
    random = torch.Generator().manual_seed(0)
    # Multiples of 1/4, which every dtype holds exactly. The gradient passed to a -inf is NaN, as it must not be used.
    weights = [(torch.randint(-8, 9, output.shape, generator=random) / 4).to(output) for output in outputs]
    weights = [w.masked_fill(output == -torch.inf, torch.nan) for w, output in zip(weights, outputs)]
    torch.autograd.backward(outputs, weights)
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def error(got: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of `exact`. Infinite if any value is not finite, save -inf in both."""
    same = (got == -torch.inf) & (exact == -torch.inf)
    got, exact = got.double().masked_fill(same, 0), exact.double().masked_fill(same, 0)
    relative = (got - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(relative.nan_to_num(nan=torch.inf))


def errors(
    got: dict[str, Tensor],
    plain: dict[str, Tensor],
    exact: dict[str, Tensor],
    products: float | None = None,
    times: float = 2,
) -> dict[str, tuple[float, float]]:
    """By result, its error and the error allowed. A result that is missing, or whose shape or dtype differs from the
    plain one's, has an infinite error.

    The allowed error is `times` the plain one's plus a few roundings, because the plain result may be exact by luck and
    is so by definition in float64. A rounding is the epsilon of the dtype that the op computes in, or `products`: the
    relative error with which the op rounds the factors of its matrix products. Where large terms cancel, the plain
    result loses digits, too: it is allowed the error that it would have if it rounded as coarsely as the products.
    """
    found = {}
    for name, x in exact.items():
        dtype = plain[name].dtype
        computed_in = torch.promote_types(dtype, torch.float32)
        roundings = (64 if computed_in == torch.float64 else 4) * (products or torch.finfo(computed_in).eps)
        right = name in got and got[name].dtype == dtype and got[name].shape == x.shape
        lost = error(plain[name], x)
        allowed = times * lost + roundings
        if products is not None and dtype == torch.float32:
            allowed = max(allowed, lost * products / torch.finfo(dtype).eps)
        found[name] = error(got[name], x) if right else math.inf, allowed
    return found


def faults(op: Op, naive: Op, inputs: Inputs, products: float | None = None) -> list[str]:
    """A sentence for every output and gradient of `op` whose error exceeds what `errors` allows."""
    exact, plain, got = run(naive, inputs, torch.float64), run(naive, inputs), run(op, inputs)
    return [
        f"{name} ({got[name].dtype if name in got else 'missing'}) errs by {ours:.1e}, allowed {allowed:.1e}"
        f" ({plain[name].dtype})"
        for name, (ours, allowed) in errors(got, plain, exact, products).items()
        if not ours <= allowed
    ]
