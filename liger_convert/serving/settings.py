"""vLLM settings for a linearized model: page layouts, layer types, and checks for unsupported settings."""

from __future__ import annotations

from typing import Any

import torch

from liger_convert.config.names import SOFTMAX
from liger_convert.model.attention import head_dims
from liger_convert.model.configuration import linear_layers
from liger_convert.model.families import family_of
from liger_convert.serving.page import PageLayout
from liger_convert.serving.split import check_split, share_of_heads
from liger_convert.utils.errors import BadInput

ATTEND = "liger_convert::attend"  # the op of a linearized layer, where vLLM splits a compiled model
LINEAR = "linear_attention"  # a transformers layer type, by which vLLM recognizes models with state


def layouts(config: Any, dtype: torch.dtype, processes: int = 1) -> dict[int, PageLayout]:
    """The page layout of every linearized layer, by layer index.

    dtype: of keys and values. processes: how many processes the heads are split over; the layouts are those of one
    process. Raises BadInput for a mixer that cannot be served.
    """
    names, mixers = config.linearization["layers"], config.linearization["mixers"]
    dims = share_of_heads(head_dims(config), processes)
    made = {name: PageLayout(mixers[name], dims, dtype) for name in dict.fromkeys(names) if name != SOFTMAX}
    return {i: made[names[i]] for i in linear_layers(config)}


def page_words(of_layers: dict[int, PageLayout]) -> int:
    """The float32 words per page: the maximum over layers, so that all pages come from one pool."""
    return max((layout.words for layout in of_layers.values()), default=0)


def why_not_captured(config: Any, of_layers: dict[int, PageLayout]) -> str | None:
    """The reason why decoding on a GPU cannot be captured as CUDA graphs; None if it can.

    of_layers: the result of `layouts`. A captured step is only numbers in tensors: every linearized layer must have the
    fused step, and nothing may be read on the host.
    """
    family, names = family_of(config), config.linearization["layers"]
    for i, layout in of_layers.items():
        if not layout.has_fused_step:
            kind = config.linearization["mixers"][names[i]]["type"]
            return f"mixer {kind!r} has no fused decode step with these options"
    if family.softcap:
        return "the fused decode step does not bound the logits of the window"
    if family.rotary == "pairs":
        return "the fused decode step does not rotate pairs of channels"
    if has_dynamic_rope(config):
        return "its rotary embedding depends on the longest request (rope_type dynamic), which is read on the host"
    return None


def has_dynamic_rope(config: Any) -> bool:
    """Whether a rotary embedding is computed anew for longer requests."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}
    return "dynamic" in kinds


def base_layer_types(config: Any) -> list[str] | None:
    """The original `layer_types` for transformers, if `mark_layers` has changed this config; else None."""
    kept: list[str] | None = getattr(config, "base_layer_types", None)
    return kept


def mark_layers(config: Any) -> None:
    """Marks the linearized layers in `layer_types`, if the config has it, in place.

    vLLM treats a model as stateless if all its layers are `full_attention`.
    """
    if getattr(config, "layer_types", None) is None or base_layer_types(config) is not None:
        return
    config.base_layer_types = list(config.layer_types)
    linear = set(linear_layers(config))
    config.layer_types = [LINEAR if i in linear else kind for i, kind in enumerate(config.layer_types)]


def check_settings(vllm_config: Any) -> None:
    """Raises BadInput for vLLM settings that linearized layers do not support."""
    parallel = vllm_config.parallel_config
    if vllm_config.speculative_config is not None:
        raise BadInput(
            "speculative_config: a linearized model's state cannot be rolled back when a guess is wrong; leave it out"
        )
    if vllm_config.lora_config is not None:
        raise BadInput("enable_lora: is not supported for a linearized model; merge the adapter into it first")
    if parallel.pipeline_parallel_size > 1:
        raise BadInput("pipeline_parallel_size: layers of a linearized model are not spread over processes; use 1")
    check_split(vllm_config.model_config.hf_config, parallel.tensor_parallel_size)
