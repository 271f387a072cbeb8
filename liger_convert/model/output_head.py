"""The map from hidden states to logits, apart from its model: a loss takes it a few tokens at a time.

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
    """logits = bounded(hidden weight^T + bias), as the families' causal language models have them.

    weight_VC: may be the embeddings. scaling: what logits are divided by (`logits_scaling`). softcap: a bound that they
    near as softcap tanh(logits / softcap) (`final_logit_softcapping`), None for none.
    """

    weight_VC: Tensor
    bias_V: Tensor | None
    scaling: float
    softcap: float | None

    @classmethod
    def of(cls, model: Any) -> OutputHead | None:
        """The head of a causal language model. None where only the model can run it: with adapters or hooks on it, in
        other numbers than weights, or sharded and not gathered."""
        linear = model.get_output_embeddings()
        plain = type(linear) is nn.Linear and "forward" not in vars(linear)
        if not plain or linear._forward_hooks or linear._forward_pre_hooks or isinstance(linear.weight, DTensor):
            return None
        scaling = getattr(model.config, "logits_scaling", 1.0)
        return cls(linear.weight, linear.bias, scaling, getattr(model.config, "final_logit_softcapping", None))

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """[N,V], in the dtype in which autocast multiplies, or else that of the weights."""
        return self.bounded(F.linear(hidden_NC, self.weight_VC, self.bias_V))

    def bounded(self, product_NV: Tensor) -> Tensor:
        """The logits, from the product with the weights."""
        if self.scaling != 1.0:
            product_NV = product_NV / self.scaling
        if self.softcap is not None:
            product_NV = torch.tanh(product_NV / self.softcap) * self.softcap
        return product_NV


# Hidden states [N,C] and their head, or logits [N,V] and None -> a loss.
HeadLoss = Callable[[Tensor, OutputHead | None], Tensor]
