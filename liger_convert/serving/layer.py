"""A linearized layer over paged caches, independent of the server that allocates the pages.

Shapes: N tokens of a batch of requests, of which the first K decode; C hidden size, H query heads, G key-value heads,
D head size; R rows of T tokens, see rows.py.
"""

from __future__ import annotations

import torch
from gated_kernels.fused_step.chunk import StepCache, StepInputs
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


def attend_batch(
    layer: LinearizedAttention,
    pages: LayerPages,
    batch: Batch,
    x_1NC: Tensor,
    angles: tuple[Tensor, Tensor],
    metadata: StepMetadata,
) -> Tensor:
    """The output of `layer` for the new tokens of all requests, [N,H,D] before its output projection.

    Updates the requests' pages. x_1NC: the layer's inputs. angles: the rotary embedding's cos and sin, [1,N,D]. Padding
    tokens, which belong to no row, give zeros, except in a batch in which all requests decode. If `pages.fused`, the
    pages of requests without earlier tokens must have been cleared.
    """
    qkv = layer.qkv(x_1NC, metadata)
    decoding = batch.decoding if pages.fused else 0
    if decoding:
        o_KHD = _decode(layer, pages, batch, qkv, angles, metadata)
        if decoding == x_1NC.shape[1]:
            return o_KHD
    o_NHD = torch.zeros_like(qkv[0][0])
    if decoding:
        o_NHD[:decoding] = o_KHD
    if not (all_rows := batch.rows(pages.fused)):
        return o_NHD
    projected = tuple(heads[0] for heads in layer.rotated(qkv, angles))
    for rows in all_rows:
        past, x_RTC = rows.load(pages.layout, pages.views), rows.take(x_1NC[0])
        of_rows = rows.metadata(pages.layout)
        inputs, window_inputs = layer.extend_window(tuple(map(rows.take, projected)), x_RTC, of_rows, past)
        o_RTHD: Tensor = layer.mixer("prefill", inputs, window_inputs, of_rows, past, layer.branches)
        rows.store(pages.layout, pages.views, past)
        rows.put(o_NHD, o_RTHD)
    return o_NHD


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
