"""Bounds on reading a file: unusual but valid files are read in full, and of a decompression bomb only a little."""

import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tiny import tiny_tokenizer
from worlds import World

from liger_convert.cli import main
from liger_convert.config.recipe import load
from liger_convert.config.sources import FileSource
from liger_convert.data import row_files
from liger_convert.data.documents import load_source
from liger_convert.utils.errors import BadInput

ROW = '{"text": "a line of text that is long enough"}\n'

# --- what is unusual and sound


def test_hidden_folders_of_a_data_folder_are_not_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "part/b.jsonl", ".c.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "part/.git/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / ".cache").symlink_to(tmp_path.parent)
    assert [row.value["text"] for row in row_files.file_rows(tmp_path)] == ["a.jsonl", "part/b.jsonl"]


@pytest.mark.parametrize(
    "text",
    ["\ufeff" + ROW + ROW, ROW.replace("\n", "\r\n") * 2, '{"text": "\\ud83d\\ude00 \\u0000 a"}\n' + ROW],
    ids=["byte order mark", "CRLF", "a pair of surrogates and a NUL"],
)
def test_unusual_text_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(text.encode())
    assert len(list(row_files.file_rows(tmp_path / "x.jsonl"))) == 2


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_a_json_list_is_the_same_read_in_pieces_of_any_size(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [{"text": 'ä ] " } 😀\n'}, 12345, [], [1, [2.5e3]], "x", None, {}, -7, "é" * 40]
    monkeypatch.setattr(row_files, "BLOCK", block)
    for indent in (None, 2):
        (tmp_path / "x.json").write_text(json.dumps(items, indent=indent, ensure_ascii=indent is None) + "\n")
        assert [row.value for row in row_files.file_rows(tmp_path / "x.json")] == items


@pytest.mark.parametrize(
    ("rows", "validation", "says"),
    [
        (40 * ["the same"], None, "has too few documents (1 different of 40): nothing is left"),
        (["a"], None, "has too few documents: nothing is left after the held-out part"),
        (["a text", "another"], ["another", "a text"], "all its texts are in its validation as well"),
    ],
    ids=["equal", "one", "validation"],
)
def test_a_source_whose_texts_are_all_held_out_says_why(
    rows: list[str], validation: list[str] | None, says: str, tmp_path: Path
) -> None:
    texts = {"train": rows, "held": validation or []}
    for name, lines in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    other = {"validation": str(tmp_path / "held.jsonl")} if validation else {"held_out": 0.5}
    with pytest.raises(BadInput, match=re.escape(says)):
        load_source(FileSource(path=str(tmp_path / "train.jsonl"), **other), tiny_tokenizer())


def test_recipes_share_values_by_anchors_and_merges(world: World) -> None:
    text = (world.folder / "recipe.yaml").read_text().replace("mixer:", "mixer: &m", 1)
    (world.folder / "recipe.yaml").write_text(text + "mixers: {a: *m, b: {<<: *m, window: 16}}\n")
    assert load(world.folder / "recipe.yaml").mixers["b"].window == 16


def test_the_largest_numbers_that_are_in_use_are_not_refused(world: World) -> None:
    stage = "stages[0]"
    sets = [f"{stage}.tokens=4e13", f"{stage}.seq_len=10000000", f"{stage}.batch_size=4096", "seed=1234567890"]
    loaded = load(world.folder / "recipe.yaml", [*sets, "mixer.window=131072", f"{stage}.max_grad_norm=1e9"])
    assert loaded.stages[0].steps == 976


# --- bombs


OPENED: dict[str, Callable[..., Any]] = {
    ".xz": lzma.LZMAFile,
    ".gz": gzip.GzipFile,
    ".zst": lambda path, mode: pyarrow.output_stream(str(path), compression="zstd"),
}


def bomb(path: Path, unit: bytes, count: int) -> None:
    """`count` times the 1 MiB of `unit`, packed."""
    block = (unit * (1 << 20))[: 1 << 20]
    with OPENED[path.suffix](path, "wb") as file:
        for _ in range(count):
            file.write(block)


@pytest.mark.parametrize("name", ["x.jsonl.xz", "x.jsonl.gz", "x.txt.xz", "x.json.gz", "x.csv.zst"])
@pytest.mark.parametrize("unit", [b"\0", b"\n", ROW.encode()], ids=["zeros", "blank lines", "rows"])
def test_a_packed_bomb_is_refused_before_it_is_worked_on(
    name: str, unit: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "PACKED_BYTES", 2 << 20)
    bomb(tmp_path / name, unit, 8)
    with pytest.raises(BadInput, match=f"{re.escape(name)}: unpacks to more than 100 times its size"):
        next(row_files.file_rows(tmp_path / name))


def test_a_parquet_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "PACKED_BYTES", 1 << 20)
    table = pyarrow.table({"text": ["x" * (8 << 20)]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
    with pytest.raises(BadInput, match=r"x\.parquet: unpacks to more than 100 times its size"):
        next(row_files.file_rows(tmp_path / "x.parquet"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_row_that_is_too_long_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROW_BYTES", 1000)
    monkeypatch.setattr(row_files, "BLOCK", 100)
    (tmp_path / name).write_text('["' + "x" * 9_000)
    with pytest.raises(BadInput, match=rf"{re.escape(name)}.* longer than 0 KiB"):
        next(row_files.file_rows(tmp_path / name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.jsonl.xz", "unpacks to more"),
        ("x.jsonl", "line 1: is longer than 64 MiB"),
        ("x.json", "longer than 64 MiB"),
    ],
)
def test_the_real_bounds_stop_gigabytes(name: str, says: str, world: World, capsys) -> None:
    path = world.folder / name
    if name.endswith(".xz"):
        bomb(path, b"\0", 1024)
    else:
        path.write_text('["')
        with open(path, "ab") as file:
            file.write(b"x" * (300 << 20))
        os.truncate(path, 8 << 30)  # what follows are zeros that take no room
    assert main.main(world.run(f"data.text.path={name}")) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_config_of_a_gigabyte_is_refused(world: World, capsys) -> None:
    os.truncate(world.base / "config.json", 1 << 30)
    assert main.main(world.convert()) == 2
    assert "config.json: is too large" in capsys.readouterr().err
