"""How far a layer sees without its memory. In texts that are no longer than that, a memory changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_convert.config.names import SOFTMAX
from liger_convert.mixers.control.window import Window
from liger_convert.mixers.registry import MIXERS


def reaches(linearization: Mapping[str, Any]) -> list[int]:
    """For each mixer in use that has a memory: the longest text, in tokens, of which nothing is in the memory yet.

    It is 0 if every token is written to the memory at once.
    """
    used = [linearization["mixers"][name] for name in dict.fromkeys(linearization["layers"]) if name != SOFTMAX]
    own = [spec for spec in used if not issubclass(MIXERS[spec["type"]], Window)]
    return [spec["window"] + spec["sinks"] if spec["window"] and spec["scope"] == "evicted" else 0 for spec in own]
