"""Adds fields of a .gguf header that transformers' reader ignores to the config, or refuses them.

The reader handles the RoPE base for most families, but no RoPE scaling, no partial rotary factor, no biases and no
logit softcapping, and it leaves sizes, windows and token ids of some families at the defaults of their config classes,
which are those of one checkpoint. A model that is read without them computes something else. Field names are those of
llama.cpp.

Shapes: C rotated channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from liger_convert.io.gguf_parts import ROTARY
from liger_convert.utils.errors import BadInput

# Models, by type and number of layers, whose attention scale does not follow from the head size. No field says so.
SCALED_BY_HEADS = {("gemma2", 46), ("gemma3_text", 62)}
COPIED = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
}
BIASES = {"attn_q.bias": "attention_bias", "ffn_up.bias": "mlp_bias"}
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
BETAS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
# fields that change a rotary embedding in ways which no config can express, and the values that change nothing
WITHOUT_EFFECT = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 1.0,
}
MIXED_IN = "rope.scaling.yarn_ext_factor"  # how much of YaRN: all of it with that type of scaling, and none with others
WAY = "give the safetensors folder that it was made from"
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def complete(config: Any, reader: Any, given: Path) -> None:
    """Adds the ignored fields to `config`, in place. config: transformers' config of the model. reader: a GGUFReader of
    its joined header. given: the first file, for error messages.

    Raises BadInput for RoPE scaling that the config cannot express.
    """
    header = reader.fields
    architecture = header["general.architecture"].contents()
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): field.contents() for name, field in header.items() if name.startswith(prefix)}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith(ROTARY)}
    for name, option in COPIED.items():
        if name in fields and hasattr(config, option):
            setattr(config, option, fields[name])
    for name, option in BIASES.items():
        if hasattr(config, option):
            setattr(config, option, any(tensor.name.endswith(name) for tensor in reader.tensors))
    for name, option in TOKENS.items():
        if f"tokenizer.ggml.{name}" not in header:
            setattr(config, option, None)
    if config.model_type == "phi3":
        config.sliding_window = fields.get("attention.sliding_window") or None
    if (config.model_type, config.num_hidden_layers) in SCALED_BY_HEADS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    rotary = getattr(config, "rope_parameters", None)
    if rotary is not None:
        # if layer types have different RoPE parameters, the header describes those of full-attention layers
        rotary = rotary.get("full_attention", rotary)
        rotary |= _rotary(fields, tensors, rotary, config, given)


def _rotary(
    fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray], before: Mapping[str, Any], config: Any, given: Path
) -> dict[str, Any]:
    """The RoPE parameters that follow from the header's `fields` and the rope `tensors`, by transformers' names.
    before: the parameters in the config so far. given: the file, for error messages. Raises BadInput for unsupported
    scaling."""
    found: dict[str, Any] = {}
    if "rope.freq_base" in fields:
        found["rope_theta"] = fields["rope.freq_base"]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (rotated := fields.get("rope.dimension_count")) is not None and rotated != head * before.get(
        "partial_rotary_factor", 1.0
    ):
        found["partial_rotary_factor"] = rotated / head
    kind, factor = fields.get("rope.scaling.type"), fields.get("rope.scaling.factor")
    if kind in ("linear", "yarn") and factor is not None:
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found["original_max_position_embeddings"] = fields.get(
                "rope.scaling.original_context_length", config.max_position_embeddings
            )
            found |= {name: fields[field] for field, name in BETAS.items() if field in fields}
    elif kind not in (None, "none"):
        raise BadInput(f"base: {given}: its rotary embedding is scaled by {kind!r}, which is not supported; {WAY}")
    for name, neutral in (WITHOUT_EFFECT | {MIXED_IN: 1.0 if kind == "yarn" else 0.0}).items():
        said = fields.get(name, neutral)
        if said != neutral and not (name == MIXED_IN and said < 0):  # below 0 means that it is not given
            raise BadInput(f"base: {given}: {name} is {said}, which is not supported; {WAY}")
    for name, values in tensors.items():
        told = found.get("rope_theta", before.get("rope_theta"))
        if name != "rope_freqs.weight" or told is None or (scaled := _llama_3(values, told)) is None:
            raise BadInput(f"base: {given}: {name} scales its rotary embedding in an unsupported way; {WAY}")
        found |= scaled
    return found


def _llama_3(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The parameters of Llama 3's RoPE scaling if it divides the frequencies by `factors` [C/2], else None. theta: the
    RoPE base."""
    factor = float(factors.max())
    base = theta ** -(np.arange(len(factors), dtype=np.float64) / len(factors))
    turns = LLAMA_3["original_max_position_embeddings"] * base / (2 * math.pi)
    low, high = LLAMA_3["low_freq_factor"], LLAMA_3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - kept) / factor + kept)
    if not np.allclose(factors, expected, rtol=1e-3):
        return None
    return {"rope_type": "llama3", "factor": factor, **LLAMA_3}
