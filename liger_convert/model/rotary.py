"""Rotary embeddings whose frequencies depend on how long a text is."""

from __future__ import annotations

from typing import Any


def length_limit(config: Any) -> int | None:
    """The length beyond which transformers rotates all tokens of a forward by other frequencies than those of a shorter
    one; None if it never does.

    That is so for the rope types `longrope` and `dynamic`. They look at the positions of the given tokens, so a longer
    text must not be read in pieces.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]  # one for each kind of layer
    limits = [
        part.get("original_max_position_embeddings") or config.max_position_embeddings
        for part in parts
        if part.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)
