"""The section `adapt` of a recipe: windows and stages are fitted to the base and to the GPU, not taken as they are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from liger_convert.config.fields import Count, Rate, Strict
from liger_convert.config.stages import Alpha, Rank, Variant


class Adapt(Strict):
    """Adapts windows and stages to a base and a GPU that the recipe was not written for, see
    [Concepts](concepts.md#adapting-a-recipe-to-another-base)."""

    section = "adapt"

    hidden_size: Count
    """Hidden size of the base that the learning rates were tuned on."""
    context: Count | None = None
    """Context of the base that `layers.long_windows` was tuned on. Its window is twice as long on a base with at least
    four times that context, if its layers are given as a fraction and the longest rows of training are at least twice
    as long as the window then is. By default the window is not made longer."""
    longest_window: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Longest window of `layers.long_windows`, as a fraction of the base's context. A longer one is shortened to a
    power of two."""
    trained: Literal["mixers", "adapters", "weights"] = "adapters"
    """What to train in stages that have rates for the base's own weights. `adapters`: low-rank adapters instead of its
    weights. `mixers`: nothing of the base, so that on texts no longer than the window the model is still the base.
    `weights`: its weights, if they fit the GPU; on a wider base their rates fall in proportion to the hidden size."""
    lora_variant: Variant = "lora"
    """Variant of the adapters, see [Lora](#lora)."""
    lora_rank: Rank = 32
    """Rank of the adapters."""
    lora_alpha: Alpha | None = None
    """Alpha of the adapters; by default the rank, so that `rslora` scales by its root."""
    lora_rate: Rate = 1.07e-4
    """Learning rate of the adapters if the base's weights have a scale of 1, which is usual. It is multiplied by their
    scale, the median of RMS(W) · √inputs over the projections, up to 5."""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of the GPU's memory that a stage may use."""
