"""An average of a stage's weights over its last steps, kept alongside the weights being trained.

It is an exponential moving average (EMA). An EMA of length n smooths as much as a plain mean of the last 2 n steps, and
the weights in it have the same average age. Unlike the plain mean it needs no starting step, and it weights the newest
weights most, which are the best ones under a decaying learning rate. Its length is a fraction of the run: a fixed decay
that suits a long run would fill a short run's average with mostly early weights.

The A and B matrices of a LoRA adapter are averaged separately. The product of their means differs from the mean of
their products by the covariance of A and B within the average, which is second order in how far they move there. The
mean of the products would have a higher rank than the adapter and could not be saved as one.

Sources: such averages also help with a decaying learning rate, and in long runs work best over about 1% of the steps
(2502.06761); length as a fraction of the run (EDM2, 2312.02696).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from liger_convert.training.sharding import copy_whole


class WeightAverage(TrainerCallback):
    """The EMA of `parameters`, in float32 and on their device. Does not affect training.

    After step t it is the mean of the weights after steps s = 1 … t, weighted by exp((s - t) / length). The initial
    weights are not part of it. Each process averages the parameters that it holds: all of them, or with sharded weights
    its slices.

    length: the average age of the averaged weights, in steps. Far below 1, the average is just the latest weights.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], length: float):
        self.parameters, self.length = parameters, length
        self.averages = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the weights after step `state.global_step` to the average, before that step's checkpoint is written."""
        # the newest step's share of the total weight so far; 1 at the first step
        share = math.expm1(-1 / self.length) / math.expm1(-state.global_step / self.length)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), share)

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Restores the averages from a checkpoint. read: returns the unsharded average of a parameter, given its
        name."""
        for name, average in self.averages.items():
            copy_whole(average, read(name))

    @torch.no_grad()
    def apply(self) -> None:
        """Overwrites the weights with their averages."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.averages[name])
