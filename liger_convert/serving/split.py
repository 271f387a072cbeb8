"""Tensor parallelism: splits a layer's heads over processes.

Each process has its share of the query and key-value heads, with the corresponding part of the projections, of the
mixer's parameters and of every page. The partial results of the output projection are summed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from liger_convert.config.names import SOFTMAX
from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.registry import BUILT_IN
from liger_convert.model.attention import head_dims
from liger_convert.model.families import family_of
from liger_convert.utils.errors import BadInput

# excluded: mixers whose decays depend on a head's index among all heads, and mixers of other packages
SPLIT_BY_HEADS = BUILT_IN.keys() - {"lightning", "retnet"}


def share_of_heads(dims: HeadDims, processes: int) -> HeadDims:
    """The sizes of a layer in each of `processes` processes."""
    return dataclasses.replace(dims, heads=dims.heads // processes, kv_heads=dims.kv_heads // processes)


def check_split(config: Any, processes: int) -> None:
    """Raises BadInput for a linearized model whose heads cannot be split over `processes` processes."""
    if processes == 1:
        return
    family, where, plan = family_of(config), f"tensor_parallel_size: {processes}", config.base_model_tp_plan or {}
    kind = family.model_type
    styles = [plan.get(f"layers.*.self_attn.{name}") for name in family.projections]
    if styles != ["colwise"] * 3 + ["rowwise"]:
        raise BadInput(f"{where} splits layers by heads, which the projections of {kind} models do not allow; use 1")
    if getattr(config, "use_qk_norm", False):  # Cohere's, whose norms have a weight for each head
        raise BadInput(f"{where} splits layers by heads, which the norms of {kind} (use_qk_norm) do not allow; use 1")
    if head_dims(config).kv_heads % processes:
        heads = head_dims(config).kv_heads
        raise BadInput(f"{where} does not divide the {heads} key-value heads of this model; use a divisor of {heads}")
    mixers = config.linearization["mixers"]
    for name in dict.fromkeys(config.linearization["layers"]):
        if name == SOFTMAX:
            continue
        if mixers[name]["type"] not in SPLIT_BY_HEADS:
            raise BadInput(f"{where}: mixer {mixers[name]['type']!r} cannot be split by heads; use 1")
        if mixers[name].get("norm_all_heads"):
            raise BadInput(f"{where} splits layers by heads, but norm_all_heads takes one norm over all of them; use 1")


def share_of_parameter(saved: Tensor, like: Tensor, process: int) -> Tensor:
    """The part of a saved mixer parameter that belongs to this process.

    like: the process's own parameter, which is smaller in dimensions that depend on the number of heads.
    """
    for axis, size in enumerate(like.shape):
        if size < saved.shape[axis]:
            saved = saved.narrow(axis, process * size, size)
    return saved
