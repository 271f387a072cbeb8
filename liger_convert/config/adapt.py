"""The section `adapt` of a recipe: its stages are fitted to the base and to the GPU instead of taken as they are."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from liger_convert.config.fields import Count, Rate, Strict
from liger_convert.config.stages import Rank


class Adapt(Strict):
    """Fits the stages to a base and a GPU that the recipe was not written for, see `pipeline.adapt`."""

    hidden_size: Count
    """Hidden size of the base that the learning rates were tuned on. On a wider base those of the base's own weights
    fall in proportion."""
    lora_rank: Rank = 64
    """Rank of the adapters that take the place of all weights where those do not fit the GPU."""
    lora_rate: Rate = 2e-4
    """Their learning rate."""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of the GPU's memory that a stage may take."""
