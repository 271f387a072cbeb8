"""Commands that check files, or list mixers and families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from liger_convert.cli.options import Json
from liger_convert.cli.output import show
from liger_convert.utils.errors import LinearizeError
from liger_convert.utils.progress import console as stderr


def verify(
    folder: Annotated[Path, typer.Argument(help="OUT of a run, or an export.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Check the files of a run or an export against the sha256 hashes recorded when they were written.

    Example: linearize verify runs/quick
    """
    from liger_convert.pipeline.verify import verify_files

    found = verify_files(folder)
    for problem in found.problems:
        stderr.print(problem, markup=False, soft_wrap=True)
    show(
        Text(f"{folder}: {found.checked - len(found.problems)} of {found.checked} files are unchanged"),
        {"checked": found.checked, "problems": found.problems},
        as_json,
    )
    if found.problems:
        raise LinearizeError(f"{folder}: {len(found.problems)} of its files have changed or are missing")


def mixers(
    heads: Annotated[int, typer.Option(help="Query heads of a layer.", min=1, max=1 << 14)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads of a layer.", min=1, max=1 << 14)] = 8,
    head_size: Annotated[int, typer.Option(help="Size of a head.", min=1, max=1 << 14)] = 128,
    as_json: Json = False,
) -> None:
    """List the mixers that can replace attention: gate, recurrence and its fast paths, state of one layer, what is
    left out of the paper's layer, whether it ended worse than a window alone after training, and options.

    Example: linearize mixers --heads 9 --kv-heads 3 --head-size 64
    """
    from liger_convert.cli.commands import describe_mixers

    described = describe_mixers(heads, kv_heads, head_size)
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for name, about in described.items():
        paths = f" ({', '.join(about['fast_paths'])})" if about["fast_paths"] else ""
        options = about["options"].items()
        values = [f"{option}={value if isinstance(value, str) else json.dumps(value)}" for option, value in options]
        rows = {
            name: about["summary"],
            "  gate": about["gate"],
            "  recurrence": about["recurrence"] + paths,
            "  state": decimal(about["state_bytes"]),
            "  lacks": about["left_out"],
            "  caution": about["caution"],
            "  options": " ".join(values),
        }
        for title, text in rows.items():
            if text:
                table.add_row(Text(title), Text(text))
        table.add_row()
    show(table, described, as_json)


def families(as_json: Json = False) -> None:
    """List the model families that can be linearized."""
    from dataclasses import asdict

    from liger_convert.model.families import FAMILIES

    norms = {"head": "per head, shared", "each_head": "per head, each its own", "flat": "over all heads"}
    table = Table("family", "attention projections", "query and key norm", "mixture of experts")
    for name, row in FAMILIES.items():
        norm = norms.get(row.qk_norm, row.qk_norm)
        table.add_row(name, ", ".join(row.projections), norm, "yes" if row.moe else "no")
    show(table, {name: asdict(row) for name, row in FAMILIES.items()}, as_json)
