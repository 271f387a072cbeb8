"""How large the weights of a base are. The learning rate of its adapters follows that, see `pipeline.adapt`."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path

from liger_convert.io.checkpoint import Checkpoint
from liger_convert.utils.errors import BadInput

# A matrix in a layer of the language model. Experts are left out, as they get no adapters.
PROJECTION = re.compile(
    r"(?:^|\.)(?:language_)?model\.layers\.(\d+)\.(?:self_attn|mlp)\.(?!.*experts?\.)[a-z_.]+\.weight"
)
LAYERS = 5  # how many layers are read, evenly spaced
ROWS = 512  # how many rows of each matrix


def weight_scale(folder: Path) -> float | None:
    """The median over projections of RMS(W) · √inputs: by how much a projection scales vectors of independent values.

    Reads some rows of the projections of a few layers. None if there are no such projections, and if the weights are
    quantized, missing or not finite, which others report.
    """
    try:
        checkpoint = Checkpoint.open(folder)
    except BadInput:
        return None
    matrices = {
        info.name: int(match[1])
        for info in checkpoint.tensors.values()
        if len(info.shape) == 2 and min(info.shape) > 0 and (match := PROJECTION.search(info.name))
    }
    last = max(matrices.values(), default=0)
    layers = {round(i * last / (LAYERS - 1)) for i in range(LAYERS)}
    found = [
        float(rows.float().square().mean().sqrt()) * math.sqrt(rows.shape[1])
        for name, layer in matrices.items()
        if layer in layers
        for rows in [checkpoint.read_rows(name, ROWS)]
    ]
    scale = statistics.median(found) if found else 0.0
    return scale if 0.0 < scale < math.inf else None
