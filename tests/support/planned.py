"""Plans of tiny recipes and bases."""

from __future__ import annotations

from typing import Any

from tiny import tiny_config

from liger_convert.config.recipe import Recipe, build
from liger_convert.pipeline.plan import Plan, make_plan


def recipe(**fields: Any) -> Recipe:
    required = {"version": 1, "name": "tiny", "base": "anywhere", "mixer": {"type": "gla", "window": 8, "sinks": 2}}
    return build(required | {"data": {"text": {"source": "pydoc"}}} | fields, "recipe")


def plan(family: str = "llama", processes: int | None = 1, **fields: Any) -> Plan:
    return make_plan(recipe(**fields), tiny_config(family), processes)
