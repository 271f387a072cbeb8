"""What the generated pages share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

MADE = "<!-- Made by docs/generate.py; change what it reads, not this page. -->"


def table_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def yaml_value(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
