"""An average of a stage's weights over its last steps, kept beside the weights that are trained.

It is an exponential moving average (EMA). One of length n evens out as much as a plain mean of the last 2 n steps, and
its weights are as old on average. But it has no step at which it begins, and it counts the newest weights most, which
under a falling rate are the best. Its length is a fraction of the run, because a decay that suits a long run makes a
short one's average of mostly early weights.

Of a LoRA adapter A and B are averaged each for itself. The product of their means differs from the mean of their
products by how A and B vary together within the average, which is of second order in how far they move there; the mean
of the products has a higher rank than the adapter and could not be saved as one.

Sources: averages of this kind help beside a falling rate, too, in long runs best over about 1% of the steps
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
    """The EMA of `parameters`, in float32 and on their device. Changes nothing of the training.

    After step t it is the mean of the weights behind the steps s = 1 … t, weighted by exp((s - t) / length). What the
    weights were before the first step does not count. In several processes each keeps its own, and all are the same.

    length: steps that an average reaches back, on average; far below 1, the average is the last weights.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], length: float):
        self.parameters, self.length = parameters, length
        self.averages = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes in the weights behind step `state.global_step`, before a checkpoint of it is written."""
        # the newest step's share of all weights so far, 1 at the first step
        share = math.expm1(-1 / self.length) / math.expm1(-state.global_step / self.length)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), share)

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Goes on from the averages of a checkpoint. read: the whole average of the parameter with a name."""
        for name, average in self.averages.items():
            copy_whole(average, read(name))

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the averages in the place of the weights."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.averages[name])
