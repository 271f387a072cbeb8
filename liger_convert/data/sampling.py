"""Samples documents from a base, many at a time. On a GPU, each decoding step is a captured CUDA graph.

Each document has its own random numbers, one per token. So the result does not depend on the batch size, except for
rounding.

Shapes: B batch, P tokens of the longest prompt, T tokens of a document, S positions in the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from liger_convert.model.cache import CACHE, StaticSoftmaxLayer
from liger_convert.model.cuda_graphs import WARM_UP, capture
from liger_convert.model.decoding import ROOM, on_one_gpu, static_steps
from liger_convert.model.placing import waits
from liger_convert.utils.device import out_of_memory
from liger_convert.utils.errors import LinearizeError

logger = logging.get_logger(__name__)


class Sampler:
    """Continues prompts to documents of exactly T = `tokens` tokens.

    End-of-text tokens do not end a document, and the model's own generation config is ignored. fixed: whether the cache
    has its full size from the start. CUDA graph capture needs this, and it is the default on one GPU; elsewhere it is
    faster to attend only to the tokens present. A captured step is reused for batches of the same size.
    """

    def __init__(self, model: Any, tokens: int, temperature: float, top_p: float, fixed: bool | None = None):
        self.model, self.tokens, self.temperature, self.top_p = model, tokens, temperature, top_p
        self.fixed = on_one_gpu(model) if fixed is None else fixed
        self.cache: Any = None
        self.captured: Callable[..., Tensor] | None = None
        self.rows = 0  # batch size of the last attempted capture

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], seeds: list[tuple[int, ...]]) -> np.ndarray:
        """[B,T]: the documents, each sampled with the random numbers of its seed. Prompts are left-padded."""
        device, sizes = self.model.device, [len(prompt) for prompt in prompts]
        longest, shortest = max(sizes), min(sizes)
        ids_BP = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        pads_B1 = torch.tensor([[longest - size] for size in sizes], device=device)
        steps = self.tokens - shortest
        numbers = [np.random.default_rng(seed).random(self.tokens) for seed in seeds]
        drawn_BT = torch.from_numpy(np.stack(numbers)).to(device)
        places_P = torch.arange(longest, device=device)
        valid_BP = places_P >= pads_B1
        cache = DynamicCache(config=self.model.config)
        logits_BV = self._logits(ids_BP, valid_BP, (places_P - pads_B1).clamp_min(0), cache)
        check_finite(logits_BV, "the base")
        ids_B1 = self._draw(logits_BV, drawn_BT[:, :1])
        made = [ids_BP, ids_B1]
        if self.fixed:
            self._keep(cache, -(-(longest + steps + WARM_UP) // ROOM) * ROOM)  # rounded up, for reuse
        else:
            self.cache = cache
        for number in range(1, steps):
            place_1 = torch.full((1,), longest + number - 1, device=device)
            given = ids_B1, pads_B1, place_1, drawn_BT[:, number : number + 1]
            if self.fixed and self.rows != len(prompts):
                self.captured, self.rows = self._capture(given), len(prompts)
            ids_B1 = (self.captured or self._step)(*given).clone()
            made.append(ids_B1)
        ids_BS = torch.cat(made, dim=1).cpu().numpy()
        return np.stack([row[longest - size :][: self.tokens] for row, size in zip(ids_BS, sizes)])

    def _keep(self, cache: Any, room: int) -> None:
        """Makes the prompts' cache the current one, with `room` positions. It is copied into the last batch's tensors
        if these have the same shape, because a captured step has fixed addresses."""
        kept = [] if self.cache is None else self.cache.layers
        same = bool(kept) and kept[0].room == room and len(kept[0].keys) == len(cache.layers[0].keys)
        for i, dynamic in enumerate(cache.layers):
            cache.layers[i] = StaticSoftmaxLayer(dynamic, room)
            if same:
                for old, new in zip(kept[i].tensors(), cache.layers[i].tensors(), strict=True):
                    old.copy_(new)
                cache.layers[i] = kept[i]
        self.cache = cache
        if not same:
            self.captured, self.rows = None, 0

    def _step(self, ids_B1: Tensor, pads_B1: Tensor, place_1: Tensor, drawn_B1: Tensor) -> Tensor:
        """[B,1]: the next tokens. ids: the last tokens. pads: padding of each row. place: the last tokens' position in
        the cache. drawn: random numbers."""
        layers = self.cache.layers if self.fixed else []
        room = layers[0].room if layers else int(place_1) + 1
        places_S = torch.arange(room, device=ids_B1.device)
        valid_BS = (places_S >= pads_B1) & (places_S <= place_1)
        with static_steps(layers):
            logits_BV = self._logits(ids_B1, valid_BS, place_1 - pads_B1, self.cache)
        return self._draw(logits_BV, drawn_B1)

    def _logits(self, ids: Tensor, valid: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """[B,V]: the logits of the last token. valid: False for padding and for unused positions of the cache."""
        inputs = {"input_ids": ids, "attention_mask": valid.long(), "position_ids": positions}
        return self.model(**inputs, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _draw(self, logits_BV: Tensor, drawn_B1: Tensor) -> Tensor:
        """[B,1]: tokens sampled by inverting the cumulative distribution at `drawn_B1`, which is uniform in [0, 1)."""
        probabilities_BV = (logits_BV.float() / self.temperature).softmax(-1).double()
        if self.top_p == 1:
            return _passed(probabilities_BV, drawn_B1)
        sorted_BV, tokens_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        return tokens_BV.gather(1, _passed(sorted_BV * (before_BV < self.top_p), drawn_B1))

    def _capture(self, given: tuple[Tensor, ...]) -> Callable[..., Tensor] | None:
        """The step as a CUDA graph, or None if it cannot be captured. Raises RuntimeError if the GPU is out of
        memory."""
        if not on_one_gpu(self.model) or waits(self.model):
            return None
        try:
            return capture(self._step, given, lambda: [t for layer in self.cache.layers for t in layer.tensors()])
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            logger.warning_once(f"writing is slower than it could be because its step is not captured: {reason}")
            return None


def check_finite(logits_BV: Tensor, whose: str) -> None:
    """Raises LinearizeError if a row has no token to choose: where its largest logit is infinite or not a number."""
    if not bool(logits_BV.amax(-1).isfinite().all()):
        raise LinearizeError(f"the logits of {whose} are not finite, so it cannot write text; are its weights damaged?")


def _passed(weights_BV: Tensor, drawn_B1: Tensor) -> Tensor:
    sums_BV = weights_BV.cumsum(-1)
    found_B1 = torch.searchsorted(sums_BV, drawn_B1 * sums_BV[:, -1:], right=True)
    return found_B1.clamp_max(weights_BV.shape[1] - 1)
