"""Commands that check files, or list mixers and families."""

from __future__ import annotations

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
    left out of the paper's layer, and options.

    Example: linearize mixers --heads 9 --kv-heads 3 --head-size 64
    """
    from liger_convert.cli.commands import describe_mixers

    described = describe_mixers(heads, kv_heads, head_size)
    widths = {"what it is": 20, "gate": 18, "recurrence": 10}
    narrow = [Column(title, max_width=width) for title, width in widths.items()]
    left_out = Column("left out of the paper's", max_width=24)
    table = Table(Column("mixer", no_wrap=True), *narrow, Column("state", no_wrap=True), left_out, "options")
    for name, about in described.items():
        recurrence = f"{about['recurrence']}: {', '.join(about['fast_paths'])}".removesuffix(": ")
        values = " ".join(f"{option}={value}" for option, value in about["options"].items())
        state = decimal(about["state_bytes"])
        table.add_row(name, about["summary"], about["gate"], recurrence, state, about["left_out"], values)
    show(table, described, as_json)


def families(as_json: Json = False) -> None:
    """List the model families that can be linearized."""
    from dataclasses import asdict

    from liger_convert.model.families import FAMILIES

    table = Table("family", "attention projections", "query and key norm", "mixture of experts")
    for name, row in FAMILIES.items():
        table.add_row(name, ", ".join(row.projections), row.qk_norm, "yes" if row.moe else "no")
    show(table, {name: asdict(row) for name, row in FAMILIES.items()}, as_json)
