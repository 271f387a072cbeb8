"""A linearized layer over paged caches, independent of the server that allocates the pages.

Shapes: N tokens of a batch of requests, of which the first K decode; C hidden size, H query heads, G key-value heads,
D head size; R rows of T tokens, see rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gated_kernels.fused_step.arguments import StepCache, StepInputs
from torch import Tensor

from liger_convert.mixers.fused_step import step_cache
from liger_convert.model.attention import LinearizedAttention
from liger_convert.serving.batch import Batch, StepMetadata
from liger_convert.serving.page import PageLayout, tensors_of


class LayerPages:
    """The pages of a layer's cache.

    pages: float32 [number of pages, at least the layout's words]. fused: whether the layer decodes by the fused step.
    """

    def __init__(self, layer: LinearizedAttention, layout: PageLayout, pages: Tensor):
        self.layout, self.pages, self.views = layout, pages, layout.views(pages)
        self._tensors = tensors_of(self.views)
        nothing = torch.zeros(1, dtype=torch.long, device=pages.device)
        cache = self.step_cache(nothing, nothing)
        self.fused = cache is not None and layer.has_fused_step(cache)

    def step_cache(self, ring_position_K: Tensor, page_K: Tensor) -> StepCache | None:
        """The tensors of a fused step of the requests with these pages; None if it does not support them."""
        ring, sinks, states = (self._tensors[group] for group in ("ring", "sinks", "states"))
        return step_cache(ring, sinks, states, ring_position_K, page_K)

    def clear(self, page_K: Tensor) -> None:
        """Fills these pages with zeros. The fused step masks what a request has not written yet by a weight of 0, so
        this must be finite; what an earlier request left in other tensors of the page may not be."""
        self.pages.index_fill_(0, page_K, 0)


class StepTensors(NamedTuple):
    """What a layer takes of the new tokens of all requests.

    x_1NC: the layer's inputs. q_1NHD, k_1NGD, v_1NGD: their projections (`LinearizedAttention.base_qkv`). cos_1ND,
    sin_1ND: of the rotary embedding.
    """

    x_1NC: Tensor
    q_1NHD: Tensor
    k_1NGD: Tensor
    v_1NGD: Tensor
    cos_1ND: Tensor
    sin_1ND: Tensor

    def first(self, tokens: int) -> StepTensors:
        """Of the first so many tokens."""
        return StepTensors(*(x[:, :tokens] for x in self))


def attend_batch(
    layer: LinearizedAttention,
    pages: LayerPages,
    batch: Batch,
    step: StepTensors,
    metadata: StepMetadata,
    o_NHD: Tensor,
) -> None:
    """Writes the output of `layer` for the new tokens of all requests to `o_NHD`, before its output projection.

    Updates the requests' pages. Padding tokens, which belong to no row, give zeros, except in a batch in which all
    requests decode. If `pages.fused`, the pages of requests without earlier tokens must have been cleared.
    """
    qkv = layer.prepared((step.q_1NHD, step.k_1NGD, step.v_1NGD), step.x_1NC, metadata)
    angles = step.cos_1ND, step.sin_1ND
    decoding = batch.decoding if pages.fused else 0
    if (real := max(decoding, batch.tokens)) < len(o_NHD):
        o_NHD[real:].zero_()
    if decoding:
        o_NHD[:decoding] = _decode(layer, pages, batch, qkv, angles, metadata)
    if not (all_rows := batch.rows(pages.fused)):
        return
    projected = layer.rotated(qkv, angles)
    for rows in all_rows:
        past, x_RTC = rows.load(pages.layout, pages.views), rows.take(step.x_1NC)
        of_rows = rows.metadata(pages.layout)
        inputs, window_inputs = layer.extend_window(tuple(map(rows.take, projected)), x_RTC, of_rows, past)
        o_RTHD: Tensor = layer.mixer("prefill", inputs, window_inputs, of_rows, past, layer.branches)
        rows.store(pages.layout, pages.views, past)
        rows.put(o_NHD, o_RTHD)


def _decode(
    layer: LinearizedAttention,
    pages: LayerPages,
    batch: Batch,
    qkv: tuple[Tensor, ...],
    angles: tuple[Tensor, Tensor],
    metadata: StepMetadata,
) -> Tensor:
    """[K,H,D]: the output for the requests that decode, by the fused step. It reads no value on the host.

    qkv: of all tokens, before rotary. Rows of padding have the engine's null page. They read and write it at the same
    time, and what becomes of it reaches no request.
    """
    K = batch.decoding
    at = metadata.decode_positions(batch.seen_R[:K], pages.layout)
    q_KHD, k_KGD, v_KGD = (x[0, :K] for x in qkv)
    cos, sin = (x[0, :K] for x in angles) if layer.rotates else (None, None)
    inputs = StepInputs(q_KHD, k_KGD, v_KGD, cos, sin, at.position_KS, at.sink_visible_KM, layer.scaling)
    o_K1HD: Tensor = layer.mixer("decode_step", inputs, pages.step_cache(at.ring_position_K, batch.page_R[:K]))
    return o_K1HD[:, 0]
