"""The sizes that a config.json may name: what no model has is a slip or a trap, and building it takes all memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_convert.utils.errors import BadInput

# Least and most, well beyond the largest published models: 126 layers of 16,384 (Llama-3.1-405B), 61 of 7,168 with 384
# experts (Kimi K2), vocabularies of 262,208 (Gemma 3), contexts of 10M tokens (Llama 4). Only a layer costs anything
# before a weight is read, some milliseconds.
SIZES = {
    "num_hidden_layers": (1, 1024),
    "hidden_size": (1, 1 << 18),
    "intermediate_size": (1, 1 << 21),
    "moe_intermediate_size": (1, 1 << 21),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 14),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 40),
    "num_experts": (0, 1 << 16),
    "num_local_experts": (0, 1 << 16),
    "num_experts_per_tok": (0, 1 << 16),
}


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raises BadInput, beginning with `where`, for a size that is no whole number or that no model has. A size that is
    None, or not named, is the library's to fill in."""
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


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
