"""A linearized layer over paged caches, independent of the server that allocates the pages.

Shapes: N tokens of a batch of requests, C hidden size, H query heads, D head size; R rows of T tokens, see rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_convert.model.attention import LinearizedAttention
from liger_convert.serving.page import PageLayout
from liger_convert.serving.rows import Rows, Views


def attend_batch(
    layer: LinearizedAttention,
    layout: PageLayout,
    views: Views,
    batch: Sequence[Rows],
    x_NC: Tensor,
    projected: tuple[Tensor, ...],
) -> Tensor:
    """The output of `layer` for the new tokens of all requests, [N,H,D] before its output projection.

    Updates the requests' pages. x_NC: the layer's inputs. projected: q and k before and after rotary, and v, as
    `layer.project` returns them, without the batch dimension. Padding tokens, which belong to no row, give zeros.
    """
    o_NHD = torch.zeros_like(projected[0])
    for rows in batch:
        past, x_RTC = rows.load(layout, views), rows.take(x_NC)
        metadata = rows.metadata(layout)
        qkv, window_inputs = layer.extend_window(tuple(map(rows.take, projected)), x_RTC, metadata, past)
        o_RTHD: Tensor = layer.mixer("prefill", qkv, window_inputs, metadata, past, layer.branches)
        rows.store(layout, views, past)
        rows.put(o_NHD, o_RTHD)
    return o_NHD
