"""Makes docs/cli.md: every command, from its help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from page_parts import MADE, table_row

from liger_convert.cli.main import app

INTRODUCTION = f"""\
# The command line

{MADE}

`linearize COMMAND --help` shows the same in a terminal.

- A base or a model is a folder, a hub id, a `.gguf` file, or `package:MODULE/FILE`.
- With `--json`, a command that has this option prints JSON instead of a table.
- Exit codes: 0 done, 1 failed, 2 bad input, 130 and 143 stopped by Ctrl-C or SIGTERM.
- An error message is one sentence that says what is wrong and where.
- Ctrl-C and SIGTERM save the training step reached so far if that takes less than 6 seconds.
  The command ends within 10 seconds. Closing the terminal does not end it."""

# Examples that the tests do not run, and why (tests/unit/test_docs.py knows the reasons).
NOT_RUN = {"bench": "gpu", "serve": "install"}


def cli_page() -> str:
    """Every command with its arguments, options and examples."""
    commands = typer.main.get_command(app).commands
    sections = ["\n".join(_section(name, command)) for name, command in commands.items()]
    return "\n\n".join([INTRODUCTION, *sections]) + "\n"


def _section(name: str, command: Any) -> list[str]:
    """The lines on one command."""
    said, examples = _help(command)
    lines = [f"## linearize {name}", "", said, "", "| argument or option | default | description |"]
    lines += ["| --- | --- | --- |", *_option_rows(command)]
    mark = f"<!-- needs: {NOT_RUN[name]} -->" if name in NOT_RUN else "<!-- run -->"
    for example in examples:
        lines += ["", mark, "```bash", example, "```"]
    return lines


def _help(command: Any) -> tuple[str, list[str]]:
    """What a command says of itself, and its examples."""
    said = (command.help or "").split("\n\n")  # one line for each paragraph, see cli/help.py
    examples = [text.removeprefix("Example: ") for text in said if text.startswith("Example: ")]
    told = (textwrap.fill(text, 118) for text in said if text and not text.startswith("Example: "))
    return "\n\n".join(told), examples


def _option_rows(command: Any) -> Iterator[str]:
    for option in command.params:
        if "--help" in option.opts:
            continue
        is_option = option.opts[0].startswith("-")
        names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        more = "..." * (option.nargs != 1)
        name = names if is_option else f"`{(option.metavar or option.name).upper().strip('[]')}{more}`"
        cells = (name, _shown_default(option), (getattr(option, "help", None) or "").strip())
        yield table_row(cells)


def _shown_default(option: Any) -> str:
    shown, value = getattr(option, "show_default", None), option.default
    if option.required:
        return "required"
    if isinstance(shown, str):
        return shown
    if value is None or value is False or value == () or callable(value) or type(value).__name__ == "Sentinel":
        return ""
    return f"`{'on' if value is True else value}`"
