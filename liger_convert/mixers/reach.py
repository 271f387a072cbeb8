"""How far a layer sees without its memory: in texts that are no longer, a memory changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_convert.config.names import SOFTMAX
from liger_convert.mixers.control.window import Window
from liger_convert.mixers.registry import MIXERS


def reaches(linearization: Mapping[str, Any]) -> list[int]:
    """Of each mixer in use that has a memory: how many tokens a text has before that holds any. 0 where it takes in
    every token at once."""
    used = [linearization["mixers"][name] for name in dict.fromkeys(linearization["layers"]) if name != SOFTMAX]
    own = [spec for spec in used if not issubclass(MIXERS[spec["type"]], Window)]
    return [spec["window"] + spec["sinks"] if spec["window"] and spec["scope"] == "evicted" else 0 for spec in own]
