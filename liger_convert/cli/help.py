"""How `--help` shows the commands: paragraphs, flags, and arguments as the pages and the messages name them."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup


def flowing(docstring: str) -> str:
    """A docstring with one line for each paragraph, so that lines break only at the width of the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n"))


class _Shown:
    """typer shows a flag as `--resume <bool>`, which reads as if it took a value, and an argument in small letters."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.metavar is None:
                if param.param_type_name == "argument":
                    param.metavar = param.name.upper()
                elif param.is_flag:
                    param.metavar = ""
        return params


class Command(_Shown, TyperCommand):
    """A command of `linearize`."""


class Group(_Shown, TyperGroup):
    """`linearize` itself."""
