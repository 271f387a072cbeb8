"""Tiny models whose layers keep their caches in pages, run as a server runs them; no server is needed."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import TOKENS, logits
from torch import Tensor

from liger_convert.model.attention import LinearizedAttention
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.serving.batch import Batch, StepMetadata
from liger_convert.serving.layer import LayerPages, StepTensors, attend_batch
from liger_convert.serving.settings import layouts, page_words

PAGES = 7
MOST = 1 << 16  # tokens of a step
REQUESTS = [TOKENS[0], TOKENS[1], TOKENS[0].flip(0), TOKENS[1].flip(0)]
PAGE_OF = {0: 4, 1: 2, 2: 6, 3: 1}


def attend(
    layer: LinearizedAttention, pages: LayerPages, batch: Batch, x_1NC: Tensor, angles: Any, metadata: StepMetadata
) -> Tensor:
    """The output of `attend_batch`, [N,H,D], in a tensor that was not finite before."""
    step = StepTensors(x_1NC, *layer.base_qkv(x_1NC), *angles)
    o_NHD = torch.full_like(step.q_1NHD[0], torch.nan)
    attend_batch(layer, pages, batch, step, metadata, o_NHD)
    return o_NHD


class PagedAttention(LinearizedAttention):
    """A layer that keeps its cache in pages, and takes the tokens of all requests as one row."""

    pages: LayerPages
    batch: Batch

    def prepare_metadata(self, metadata: SequenceMetadata) -> None:
        pass

    def forward(self, hidden_states: Tensor, position_embeddings: Any, metadata: Any = None, **_: Any) -> Any:
        o_NHD = attend(self, self.pages, self.batch, hidden_states, position_embeddings, metadata)
        return self.o_proj(o_NHD.flatten(1)[None]), None


def paged(model: Any) -> list[PagedAttention]:
    """Turns the layers of a model into paged ones. Pages begin as another request's garbage, which is not finite."""
    of_layers = layouts(model.config, torch.float32)
    found = []
    for i, layout in of_layers.items():
        layer = model.model.layers[i].self_attn
        layer.__class__ = PagedAttention
        layer.pages = LayerPages(layer, layout, torch.full((PAGES, page_words(of_layers) + 3), torch.nan))
        found.append(layer)
    return found


def start_step(layers: list[PagedAttention], lengths: list[int], seen: list[int], pages: list[int]) -> None:
    """Gives the layers the batch of a step, and clears the pages of new requests where the layers need it."""
    starts, seen_R = [0, *torch.tensor(lengths).cumsum(0).tolist()], torch.tensor(seen)
    batch = Batch(starts, seen, torch.tensor(pages), torch.where(torch.tensor(lengths) > 0, seen_R, -1), MOST)
    new_pages = batch.new_pages()
    for layer in layers:
        if layer.pages.fused and new_pages is not None:
            layer.pages.clear(new_pages)
        layer.batch = batch


def serve(model: Any, layers: list[PagedAttention], steps: list[dict[int, int]]) -> dict[int, Tensor]:
    """The logits of every request's tokens as a server reads them.

    steps: for each step, the requests that take part, and how many tokens of each are read.
    """
    seen, parts = dict.fromkeys(PAGE_OF, 0), {r: [] for r in PAGE_OF}
    for step in steps:
        lengths = list(step.values())
        start_step(layers, lengths, [seen[r] for r in step], [PAGE_OF[r] for r in step])
        tokens = torch.cat([REQUESTS[r][seen[r] : seen[r] + n] for r, n in step.items()])
        positions = torch.cat([torch.arange(seen[r], seen[r] + n) for r, n in step.items()])
        found = logits(model, tokens[None], position_ids=positions[None], metadata=StepMetadata(positions))[0]
        for (r, n), part in zip(step.items(), found.split(lengths)):
            parts[r].append(part)
            seen[r] += n
    return {r: torch.cat(part) for r, part in parts.items() if part}
