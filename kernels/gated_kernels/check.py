"""Whether an implementation of an op is right: its error beside that of the plain reference in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Op = Callable[..., tuple[Tensor, ...]]
Inputs = dict[str, Any]


def run(op: Op, inputs: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every output, and the gradient of a random weighting of them by every floating-point input."""
    leaves = {
        name: value.detach().to(dtype or value.dtype, copy=True).requires_grad_()
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    outputs = op(**inputs | leaves)
    random = torch.Generator().manual_seed(0)
    # Quarters, which every dtype holds exactly; what is sent back to a -inf must not matter.
    weights = [(torch.randint(-8, 9, output.shape, generator=random) / 4).to(output) for output in outputs]
    weights = [w.masked_fill(output == -torch.inf, torch.nan) for w, output in zip(weights, outputs)]
    torch.autograd.backward(outputs, weights)
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def error(got: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm; infinite when anything else than a -inf of both is not finite."""
    same = (got == -torch.inf) & (exact == -torch.inf)
    got, exact = got.double().masked_fill(same, 0), exact.double().masked_fill(same, 0)
    relative = (got - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(relative.nan_to_num(nan=torch.inf))


def faults(op: Op, reference: Op, inputs: Inputs, products: float | None = None) -> list[str]:
    """A sentence for every output and gradient of `op` that errs more than twice as much as the reference does.

    The reference may be exact by luck, and is so by definition in float64, hence a few roundings more are allowed:
    in what it computes in, or of `products`, by which an op rounds the factors of its matrix products.
    """
    exact, plain, got = run(reference, inputs, torch.float64), run(reference, inputs), run(op, inputs)
    found = [f"{name} is missing" for name in exact if name not in got]
    for name, value in got.items():
        computed_in = torch.promote_types(value.dtype, torch.float32)
        roundings = (64 if computed_in == torch.float64 else 4) * (products or torch.finfo(computed_in).eps)
        ours, allowed = error(value, exact[name]), 2 * error(plain[name], exact[name]) + roundings
        if value.dtype != plain[name].dtype or not ours <= allowed:
            found.append(f"{name} ({value.dtype}) errs by {ours:.1e}, allowed {allowed:.1e} ({plain[name].dtype})")
    return found
