"""Which bases can be linearized, and how to build them on the meta device."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from liger_convert.io.config_sizes import ROTARY_LISTS, check_rotary
from liger_convert.model.families import family_of, head_dim, is_linearized
from liger_convert.utils.errors import BadInput, first_line

SLIDING = "sliding_attention"


def check_base(config: Any) -> None:
    """Raises BadInput unless `config` is an unquantized, causal base of a supported family."""
    if is_linearized(config):
        raise BadInput(f"base: model_type {config.model_type!r} is linearized already; give the model it was made from")
    family_of(config)
    if getattr(config, "use_bidirectional_attention", None):
        what = "its tokens also see later ones, which no recurrence can replace"
        raise BadInput(f"config.json: use_bidirectional_attention is set: {what}; give a causal language model")
    if getattr(config, "quantization_config", None) is not None:
        raise BadInput("base: config.json says it is quantized; give the bf16, fp16 or fp32 weights it was made from")
    check_settings(config)


def check_settings(config: Any) -> None:
    """Raises BadInput for settings of a supported family's config that are not a causal decoder's or contradict others.

    These are a window that the layers ignore but the cache does not, sliding layers without a window size, a head size
    that attention ignores but the rotary embedding does not, and a scaling of queries whose numbers are missing.
    """
    declared = {name for cls in type(config).__mro__ for name in getattr(cls, "__annotations__", ())}
    for name in ("sliding_window", "layer_types"):
        # such as a Mistral's window, left over where its weights became a Llama
        if name not in declared and getattr(config, name, None) is not None:
            what = f"is no setting of {config.model_type}, yet transformers would shorten its cache by it"
            raise BadInput(f"config.json: {name} {what}; remove it")
    if SLIDING in (getattr(config, "layer_types", None) or []) and config.sliding_window is None:
        unused = getattr(config, "use_sliding_window", None) is False
        why = "use_sliding_window is false" if unused else "sliding_window is null"
        raise BadInput(
            f"config.json: layer_types has {SLIDING}, but {why}; give a size, or make these layers full_attention"
        )
    divided = config.hidden_size // config.num_attention_heads
    if family_of(config).divides_heads and head_dim(config) != divided:
        what = f"{head_dim(config)}, but {config.model_type} computes with {divided}, hidden_size / num_attention_heads"
        raise BadInput(
            f"config.json: head_dim is {what}, and transformers would rotate too many or too few channels; remove it"
        )
    scaled_by = ("llama_4_scaling_beta", "original_max_position_embeddings") if family_of(config).position_scale else ()
    for name in scaled_by:
        value = (config.rope_parameters or {}).get(name)
        if not isinstance(value, int | float):
            what = f"a number, by which {config.model_type} scales its queries, not {json.dumps(value)}"
            raise BadInput(f"config.json: rope_parameters.{name} should be {what}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        value = getattr(config, name, None)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise BadInput(f"config.json: {name} should be a number above 0, or null, not {json.dumps(value)}")
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts is not None and (each := getattr(config, "num_experts_per_tok", None) or 0) > experts:
        raise BadInput(f"config.json: num_experts_per_tok {each} is more than the number of experts, {experts}")
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput(
            "config.json: is_encoder_decoder is true, but a decoder alone is generated from; set it to false"
        )


def context_length(config: Any) -> int | None:
    """The context length in tokens that the base supports, rotary scaling included; None if its config does not say.

    `max_position_embeddings` is the extended context for `llama3` and `longrope`, and for models whose layer types have
    separate rotary parameters (Gemma 3). For `linear` and `dynamic` it is the original context. If the config also
    states the original context, the result is the larger of `max_position_embeddings` and original context times
    factor. This covers `yarn`, whose configs follow either convention.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1.0
    if positions is None or kind not in ("linear", "dynamic", "yarn"):
        return positions
    original = rope.get("original_max_position_embeddings") or (0 if kind == "yarn" else positions)
    return max(positions, int(original * factor))


def attention_option(config: Any) -> dict[str, str]:
    """Keyword arguments for `from_pretrained` and `from_config`: eager attention where its logits are softcapped.

    This matters for bases such as Gemma 2. transformers 5.19 defaults to sdpa for them, which silently ignores the
    softcap; 5.23 defaults to eager.
    """
    return {} if getattr(config, "attn_logit_softcapping", None) is None else {"attn_implementation": "eager"}


def meta_model(config: Any) -> Any:
    """The base's model on the meta device.

    Raises BadInput when the config is inconsistent, names an unknown rope_type or activation, or scales rotary
    embeddings by a number that is not positive, with which transformers would compute nonsense.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    check_rotary({"rope_parameters": rope}, "config.json")  # again: transformers has added what stands elsewhere
    for part in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        kind = part.get("rope_type", "default")
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise BadInput(f"config.json: rope_type {kind!r} is unknown to transformers; use one of {known}")
        rotated = int(head_dim(config) * (part.get("partial_rotary_factor") or 1))
        for name in ROTARY_LISTS if kind == "longrope" else ():
            if isinstance(part.get(name), list) and len(part[name]) != rotated // 2:
                what = f"should have {rotated // 2} numbers, one for each pair of channels, not {len(part[name])}"
                raise BadInput(f"config.json: {name} {what}")
    for name in ("hidden_act", "hidden_activation"):
        value = getattr(config, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            raise BadInput(f"config.json: {name} {value!r} is unknown to transformers; silu and gelu are usual ones")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **attention_option(config))
    except Exception as error:  # the family's code may raise anything for inconsistent sizes
        raise BadInput(f"config.json: no {config.model_type} can be built from it: {first_line(error)}") from error
