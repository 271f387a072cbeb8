"""The output head, detached from its model, so that a loss can compute logits for a few tokens at a time.

Shapes: N tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class OutputHead:
    """logits = bounded(hidden weight^T + bias), as the families' causal language models compute them.

    weight_VC: may be tied to the embeddings. scaling: divides the logits (`logits_scaling`, or 1 / `logit_scale`).
    softcap: replaces logits by softcap tanh(logits / softcap) (`final_logit_softcapping`); None disables it.
    """

    weight_VC: Tensor
    bias_V: Tensor | None
    scaling: float
    softcap: float | None

    @classmethod
    def of(cls, model: Any) -> OutputHead | None:
        """The head of a causal language model.

        None if only the model can run it: it is not a plain nn.Linear (adapters, quantization), has forward hooks, or
        its weight is sharded and not gathered.
        """
        linear = model.get_output_embeddings()
        plain = type(linear) is nn.Linear and "forward" not in vars(linear)
        if not plain or linear._forward_hooks or linear._forward_pre_hooks or isinstance(linear.weight, DTensor):
            return None
        softcap = getattr(model.config, "final_logit_softcapping", None)
        return cls(linear.weight, linear.bias, logits_divisor(model.config), softcap)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """[N,V], in autocast's dtype if that is active, else in the weights' dtype."""
        return self.bounded(F.linear(hidden_NC, self.weight_VC, self.bias_V))

    def bounded(self, product_NV: Tensor) -> Tensor:
        """Logits [N,V] from the output of the linear layer: applies scaling and softcap."""
        if self.scaling != 1.0:
            product_NV = product_NV / self.scaling
        if self.softcap is not None:
            product_NV = torch.tanh(product_NV / self.softcap) * self.softcap
        return product_NV


def logits_divisor(config: Any) -> float:
    """What a model of this config divides its logits by: Granite's `logits_scaling`, or 1 / `logit_scale` of Cohere."""
    divisor: float = getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0)
    return divisor


# Hidden states [N,C] and their head, or logits [N,V] and None -> a loss.
HeadLoss = Callable[[Tensor, OutputHead | None], Tensor]
