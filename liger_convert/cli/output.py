"""What commands print."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, RenderableType


def show(table: RenderableType, value: Any, as_json: bool) -> None:
    """Prints `value` as JSON, or as the table that stands for it."""
    if as_json:
        unicode = str(sys.stdout.encoding).lower().replace("-", "") == "utf8"
        print(json.dumps(value, indent=2, ensure_ascii=not unicode))
    else:
        stdout().print(table)


def stdout() -> Console:
    """A log file gets wide tables: nobody's window sets its width."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)
