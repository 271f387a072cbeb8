"""Plausible sizes and rotary parameters in a config.json. Others are mistakes or malicious: building such a model could
fill the memory, and transformers would fail in its own words or compute nonsense."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from liger_convert.utils.errors import BadInput

# Minimum and maximum. The maxima are well beyond the largest published models: 126 layers of size 16,384
# (Llama-3.1-405B), 61 layers of size 7,168 with 384 experts (Kimi K2), a vocabulary of 262,208 (Gemma 3), contexts of
# 10M tokens (Llama 4). Before weights are read, only the number of layers costs time, some milliseconds each.
SIZES = {
    "num_hidden_layers": (1, 1024),
    "hidden_size": (1, 1 << 18),
    "intermediate_size": (1, 1 << 21),
    "moe_intermediate_size": (1, 1 << 21),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 14),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (2, 1 << 40),
    "sliding_window": (1, 1 << 40),
    "num_experts": (0, 1 << 16),
    "num_local_experts": (0, 1 << 16),
    "num_experts_per_tok": (0, 1 << 16),
}

# Numbers above 0 among the rotary parameters. Some may be null, but not those that their kind computes with.
ROTARY = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "partial_rotary_factor",
)
ROTARY_LISTS = ("short_factor", "long_factor")
COMPUTED_WITH = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {*ROTARY_LISTS},
}


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raises BadInput, with a message that begins with `where`, for a size that is not an integer or not plausible.

    A size that is None or missing is accepted, since transformers fills in a default. Also raises it if the number of
    attention heads is not a multiple of the number of key-value heads, and for any number that is not finite.
    """
    for name, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{where}: {name} should be a finite number, not {value}")
    for name, (least, most) in SIZES.items():
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadInput(f"{where}: {name} should be a whole number, not {_short(value)}")
        if not least <= value <= most:
            raise BadInput(f"{where}: {name} should be from {least:,} to {most:,}, not {_short(value)}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise BadInput(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")


def check_rotary(config: Mapping[str, Any], where: str) -> None:
    """Raises BadInput, with a message that begins with `where` and the path of the field, for rotary parameters with
    which nothing can be computed. `config` may have them for each kind of layer, and in the text model's config."""
    for prefix, section in (("", config), ("text_config.", config.get("text_config"))):
        for name in ("rope_parameters", "rope_scaling"):
            value = section.get(name) if isinstance(section, Mapping) else None
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise BadInput(f"{where}: {prefix}{name} should be a mapping with a rope_type, not {_short(value)}")
            layers = {f"{name}.{key}": part for key, part in value.items() if isinstance(part, Mapping)}
            for path, part in (layers or {name: value}).items():
                _check_rotary_part(part, f"{where}: {prefix}{path}")


def _check_rotary_part(part: Mapping[str, Any], where: str) -> None:
    kind = part.get("rope_type", part.get("type"))
    required = {"rope_theta", *COMPUTED_WITH.get(kind if isinstance(kind, str) else "", ())}
    for name in [name for name in (*ROTARY, *ROTARY_LISTS) if name in part]:
        value = part[name]
        if value is None and name not in required:
            continue
        is_list = name in ROTARY_LISTS
        numbers = value if is_list and isinstance(value, list) else [] if is_list else [value]
        if not numbers or not all(_is_above_0(number) for number in numbers):
            wanted = "a list of numbers above 0" if is_list else "a number above 0"
            raise BadInput(f"{where}.{name} should be {wanted}, not {_short(value)}")
    if (part.get("partial_rotary_factor") or 1) > 1:
        value = _short(part["partial_rotary_factor"])
        raise BadInput(f"{where}.partial_rotary_factor should be a fraction of a head, at most 1, not {value}")


def _is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else f"{text[:40]}…"
