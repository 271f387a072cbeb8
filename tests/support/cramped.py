"""Models placed as on a GPU that cannot hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_convert.model import placing
from liger_convert.model.placing import place_both
from liger_convert.pipeline import layer_selection


def cramped(monkeypatch: pytest.MonkeyPatch, part: float) -> list[set[str]]:
    """Places models as on a GPU that has room for a fraction of both. Gives the parameters of each that stay in host
    memory."""
    found: list[set[str]] = []

    def placed(first: Any, second: Any, device: torch.device) -> Any:
        size = sum(p.nbytes for model in (first, second) for p in model.parameters())
        seen: list[int] = []

        def free_memory(device: torch.device) -> int:
            """What the first model leaves, when the second one's turn comes."""
            seen.append(sum(p.nbytes for p in first.parameters() if not p.is_meta) if seen else 0)
            return int(part * size / placing.SHARE) - seen[-1]

        monkeypatch.setattr(placing, "free_memory", free_memory)
        models = place_both(first, second, device)
        found.extend({name for name, p in model.named_parameters() if p.is_meta} for model in models)
        return models

    monkeypatch.setattr(layer_selection, "place_both", placed)
    return found
