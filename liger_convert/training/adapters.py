"""What LoRA's adapters are added to."""

from __future__ import annotations

from typing import Any

from peft import PeftModel


def adapted_model(model: Any) -> Any:
    """The model that peft wraps with its adapters; one without adapters as it is."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
