"""Linearized models: classes, configs, branch switching and alignment targets. `model.loading` loads them from disk.

Importing this package registers every linearized family with transformers' Auto classes.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from liger_convert.model.alignment import AlignTargets
from liger_convert.model.attention import MIXER_MODULE, LinearizedAttention, head_dims
from liger_convert.model.cache import LinearizedCacheLayer
from liger_convert.model.configuration import linear_layers, linearized_config
from liger_convert.model.modeling import (
    CLASSES,
    HEAD_CLASSES,
    new_state,
    set_branches,
    take_auxiliary_loss,
)

__all__ = [
    "CLASSES",
    "HEAD_CLASSES",
    "MIXER_MODULE",
    "AlignTargets",
    "LinearizedAttention",
    "LinearizedCacheLayer",
    "collect_align_targets",
    "head_dims",
    "linear_layers",
    "linearized_classes",
    "linearized_config",
    "new_state",
    "parameter_group",
    "set_branches",
    "take_auxiliary_loss",
]


def linearized_classes(model_type: str) -> tuple[type, type, type]:
    """The config, backbone and causal language model classes for a base's `model_type`."""
    return CLASSES[model_type]


def collect_align_targets(base: Any, batch: dict[str, torch.Tensor], layers: list[int]) -> AlignTargets:
    """Runs the base on `batch` once, without gradients, and records the attention inputs and outputs of `layers`."""
    targets = AlignTargets([], [], [], [])

    def record(_module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: tuple) -> None:
        targets.hidden.append(kwargs["hidden_states"])
        targets.position_embeddings.append(kwargs["position_embeddings"])
        targets.outputs.append(output[0])

    hooks = [base.model.layers[i].self_attn.register_forward_hook(record, with_kwargs=True) for i in layers]
    try:
        with torch.no_grad():
            base.model(**batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    targets.layers.extend(layers)
    return targets


def parameter_group(name: str, config: Any) -> str:
    """The group that the parameter `name` belongs to.

    One of `mixer`, `attention` (projections and norms of linearized layers), `embeddings` (token embeddings and output
    head) or `body`.
    """
    match = re.search(r"layers\.(\d+)\.self_attn\.(.*)", name)
    if match and int(match[1]) in linear_layers(config):
        return "mixer" if match[2].startswith(MIXER_MODULE) else "attention"
    return "embeddings" if "embed_tokens" in name or "lm_head" in name else "body"
