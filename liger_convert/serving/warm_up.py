"""Prefill before there are requests, so that a server sees its memory and finds its kernels compiled.

A server measures memory by a forward without requests, in which linearized layers have no pages. Triton
compiles some kernels again for sizes that are 1 or multiples of 16, scans in parts, and a mask or none.

Shapes: N tokens of the forward, R requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_convert.model.attention import LinearizedAttention
from liger_convert.serving.batch import Batch, StepMetadata
from liger_convert.serving.layer import LayerPages, StepTensors, attend_batch
from liger_convert.serving.page import PageLayout

WARMED_UP = ("cuda",)  # types of devices; on a CPU nothing is compiled, and memory is not measured
CHUNK = 64  # tokens in a chunk of a scan
LENGTHS = (16 * CHUNK, 4 * CHUNK, CHUNK)  # of prompts beside the longest
UNEVEN = 3  # tokens less, for a length that is not a multiple of 16


class Chunks(NamedTuple):
    """A step of prompts, or chunks of prompts: the new tokens of each, and the number of earlier tokens of all."""

    lengths: list[int]
    seen: int


def steps_of(tokens: int, layout: PageLayout) -> list[Chunks]:
    """The steps to run for a server that reads up to `tokens` new tokens in a step.

    The first reads all of them as a new prompt, and the second as the rest of a prompt.
    """
    long = layout.cache_window + layout.sinks  # so many fill the window, and the sinks have left it
    lengths = [tokens, tokens - CHUNK - UNEVEN]  # the chunks of one are no multiple of 16, either
    for length in LENGTHS:
        if length < tokens:
            lengths += length, length - UNEVEN
    found = [Chunks([length], seen) for length in lengths if length > 0 for seen in (0, long)]
    padded = min(tokens // 2, CHUNK)
    for length in (padded, padded - UNEVEN):
        if length > UNEVEN:  # a mask is given, also where the window is not full yet
            found += [Chunks([length, length - UNEVEN], seen) for seen in (0, 1)]
    if tokens > 1:
        found.append(Chunks([1, 1], long))
        found.append(Chunks([tokens - 1, 1], 0))  # too long for a prompt of one token to be padded to its length
    return found


class WarmUp:
    """Runs the steps of `steps_of` for the layers of one layout: once, and again only for more tokens than before."""

    def __init__(self, layout: PageLayout):
        self._layout, self._tokens = layout, 0

    def run(self, layer: LinearizedAttention, step: StepTensors, position_1N: Tensor) -> None:
        """Runs `layer` on the first tokens of a forward, and drops what comes out.

        All requests have the same page, which is dropped, too. Steps leave nothing behind, so the peak of memory is
        that of the largest one.
        """
        tokens, device = step.x_1NC.shape[1], step.x_1NC.device
        if tokens <= self._tokens:
            return
        self._tokens = tokens
        pages = LayerPages(layer, self._layout, torch.zeros(1, self._layout.words, dtype=torch.float32, device=device))
        for lengths, seen in steps_of(tokens, self._layout):
            starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
            page_R = torch.zeros(len(lengths), dtype=torch.long, device=device)
            batch = Batch(starts, [seen] * len(lengths), page_R, torch.full_like(page_R, seen), tokens)
            part, metadata = step.first(starts[-1]), StepMetadata(position_1N[0, : starts[-1]])
            attend_batch(layer, pages, batch, part, metadata, torch.empty_like(part.q_1NHD[0]))
