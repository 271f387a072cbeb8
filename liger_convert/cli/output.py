"""Prints the results of commands."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, RenderableType


def show(table: RenderableType, value: Any, as_json: bool) -> None:
    """Prints `value` as JSON if `as_json`, otherwise `table`, which shows it."""
    if as_json:
        unicode = str(sys.stdout.encoding).lower().replace("-", "") == "utf8"
        print(json.dumps(value, indent=2, ensure_ascii=not unicode))
    else:
        stdout().print(table)


def stdout() -> Console:
    """A console on standard output. If it is not a terminal, such as a log file, tables are 120 columns wide."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)
