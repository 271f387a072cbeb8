"""Two faults of vLLM on a CPU, with which a server of linearized models would end."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor


def spare_generators(runner: type[Any]) -> None:
    """Makes a model runner of vLLM serve requests with a seed of their own whose prompts are read in parts.

    vLLM draws a token after each part, drops all but the last one, and sets the request's generator back. torch cannot
    do that on a CPU. Here a token that is dropped is drawn without the request's generator, so nothing is set back.
    """
    sample = runner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        dropped = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        spared = {i: generators.pop(i) for i in dropped if i in generators}
        try:
            return sample(self, *args, **kwargs)
        finally:
            generators.update(spared)

    runner.sample_tokens = sample_tokens


def take_all_inputs(kernel: type[Any]) -> None:
    """Makes vLLM's linear map in int8 take inputs [...,C] of any dtype also on CPUs with AMX, as it does on others.

    For AMX it has a routine of its own, which fails for anything but [N,C] in bfloat16 or float16.
    """
    apply, choose = kernel._apply_weights_sgl, kernel.process_weights_after_loading

    @functools.wraps(apply)
    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows: Tensor = apply(self, layer, x.flatten(0, -2), bias)
        return rows.unflatten(0, x.shape[:-1])

    @functools.wraps(choose)
    def process_weights(self: Any, layer: Any) -> None:
        if torch.get_default_dtype() == torch.float32:  # vLLM makes it the dtype of the inputs while it loads
            self.linear_method = self._apply_weights_onednn
            self.process_weights_for_onednn(layer)
        else:
            choose(self, layer)

    kernel._apply_weights_sgl, kernel.process_weights_after_loading = apply_weights, process_weights
