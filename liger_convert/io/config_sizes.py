"""Plausible sizes in a config.json. Others are mistakes or malicious, and building such a model could fill the
memory."""

from __future__ import annotations

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
    "max_position_embeddings": (1, 1 << 40),
    "num_experts": (0, 1 << 16),
    "num_local_experts": (0, 1 << 16),
    "num_experts_per_tok": (0, 1 << 16),
}


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raises BadInput, with a message that begins with `where`, for a size that is not an integer or not plausible.

    A size that is None or missing is accepted, since transformers fills in a default. Also raises it if the number of
    attention heads is not a multiple of the number of key-value heads.
    """
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
