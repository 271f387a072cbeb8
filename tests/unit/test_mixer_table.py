"""eval/mixer_table.py: every entry trains on the same tokens, stopped runs are resumed, and all results are in one
table.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import save_tiny_base

from liger_convert.config import recipe
from liger_convert.mixers import MIXERS
from liger_convert.utils.errors import BadInput

ROOT = Path(__file__).parents[2]
SUITE = """description: tiny
text: [{window: 32, windows: 4}, {source: other, window: 32, windows: 4}]
copying: [{length: 8, draws: 2, tokens: uniform}]
"""


sys.path.append(str(ROOT / "eval"))
table: Any = importlib.import_module("mixer_table")


def arguments(out: Path, *words: str) -> Any:
    return table.arguments(["base", "--text", "a.jsonl", "--held-out", "b.jsonl", "--out", str(out), *words])


def test_every_entry_is_trained_alike(tmp_path: Path) -> None:
    files = table.written_recipes(arguments(tmp_path, "--tokens", "3e5", "--seed", "5"))
    assert list(files) == list(MIXERS)
    loaded = [recipe.load(file) for file in files.values()]
    first = loaded[0].dump()
    assert (first["seed"], first["base"], first["data"]["text"]["validation"]) == (5, "base", "b.jsonl")
    assert [stage["tokens"] for stage in first["stages"]] == [100_000, 200_000]
    for other in loaded:
        assert {key for key in first if other.dump()[key] != first[key]} <= {"name", "mixer"}


def test_an_entry_may_have_options_or_be_a_recipe(tmp_path: Path) -> None:
    entries = ["gla:gate=constant,codes=512", "gla", str(ROOT / "recipes" / "smollm2-135m-lolcats.yaml")]
    files = table.written_recipes(arguments(tmp_path, "--mixers", *entries))
    assert list(files) == ["gla-gate-constant-codes-512", "gla", "smollm2-135m-lolcats"]
    gates, plain, lolcats = (recipe.load(file) for file in files.values())
    assert gates.mixer.to_dict() == {"type": "gla", "gate": "constant", "codes": 512}
    assert plain.mixer.to_dict() == {"type": "gla"}
    assert [stage.kind for stage in lolcats.stages] == ["align", "finetune"]
    assert lolcats.eval.suite == plain.eval.suite


def test_long_entries_that_begin_alike_have_names_of_their_own(tmp_path: Path) -> None:
    begin = "mamba2:combine=memory,scope=all,gate=constant,gate_proj=true,short_conv=4"
    entries = [begin, f"{begin},conv_bias=true", f"{begin},skip=true"]
    files = table.written_recipes(arguments(tmp_path, "--mixers", *entries))
    assert [recipe.load(file).mixer.to_dict().get("skip") for file in files.values()] == [None, None, True]
    assert all(name.startswith("mamba2-combine-memory-scope-all-gate-constant") for name in files)
    assert list(files) == list(table.written_recipes(arguments(tmp_path, "--mixers", *entries)))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["glaa"], "did you mean gla"),
        (["gla:gate"], "write option=value"),
        (["gla:gaet=head"], "did you mean gate"),
        (["gla", "gla"], "gla is there twice"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_before_anything_is_written(
    entries: list[str], says: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadInput, match=says):
        table.written_recipes(arguments(out, "--mixers", *entries))
    assert not out.exists()


def test_a_folder_with_other_runs_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, "--mixers", "gla")
    (file,) = table.written_recipes(args).values()
    (tmp_path / "gla").mkdir()
    manifest = {"recipe": {"text": file.read_text()}}
    (tmp_path / "gla" / "manifest.json").write_text(json.dumps(manifest))
    table.written_recipes(args)  # the same: it goes on
    with pytest.raises(BadInput, match="is a run of a different recipe"):
        table.written_recipes(arguments(tmp_path, "--mixers", "gla", "--seed", "1"))


@pytest.mark.parametrize(
    ("tokens", "rows", "length"), [(1e6, 2, 4096), (20_000, 2, 2048), (1_100, 2, 128), (600, 1, 128)]
)
def test_few_tokens_make_rows_shorter_and_then_fewer(tokens: float, rows: int, length: int) -> None:
    stage = table.with_tokens({"tokens": 1e6, "batch_size": 2, "seq_len": 4096}, tokens)
    assert (stage["batch_size"], stage["seq_len"], stage["tokens"]) == (rows, length, int(tokens))


def test_the_page_shows_what_was_measured_and_what_failed(tmp_path: Path) -> None:
    measured = {name: {"value": 21.5, "stderr": 0.5, "n": 4} for name in ("text_ppl", "text_byte_ppl")}
    run = {
        "measures": measured,
        "memory_used": True,
        "tokens": 3_000_000,
        "training_tokens_per_s": 41_234.4,
        "cache_bytes_per_token": 1846.2,
        "decode_ms": {"median": 3.14159},
    }
    of_base = {"measures": {"text_ppl": {"value": 20.0, "stderr": 0.4, "n": 4}}, "cache_bytes_per_token": 46080}
    whole = {
        "runs": {"gla": run},
        "base": of_base,
        "window_only_untrained": {"measures": {}},
        "machine": "a machine",
        "failed": {"mom": "exit code 1: why"},
    }
    page = table.page(whole, arguments(tmp_path))
    assert "| `gla` | 21.50 ± 0.50 | yes | 1,846 | 41,234 | 3.14 |" in page
    assert "| base | 20.00 ± 0.40 |  | 46,080 |  |  |" in page
    assert "byte_ppl" not in page
    assert "- `mom`: exit code 1: why" in page
    assert "3,000,000 tokens" in page


@pytest.mark.slow
def test_a_table_is_made_and_made_again_only_where_something_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_base("llama", tmp_path / "base")
    for name in ("text", "held_out"):
        rows = [{"text": f"{i} bottles of beer on the {name}, {i} bottles of beer."} for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "suite.yaml").write_text(SUITE)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [str(ROOT), str(ROOT / "kernels"), *sys.path])
    words = [str(tmp_path / "base"), "--text", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "out")]
    words += ["--held-out", str(tmp_path / "held_out.jsonl"), "--suite", str(tmp_path / "suite.yaml")]
    words += ["--tokens", "2000", "--jobs", "2", "--set", "device=cpu"]
    assert table.main([*words, "--mixers", "window", "gla:codes=8"]) == 0, capfd.readouterr()
    out = tmp_path / "out"
    found = json.loads((out / "table.json").read_text())
    assert list(found["runs"]) == ["window", "gla-codes-8"]
    assert found["failed"] == {}
    assert all(run["training_tokens_per_s"] > 0 and run["decode_ms"] for run in found["runs"].values())
    assert found["base"]["decode_ms"]["median"] > 0
    assert (out / "window" / "manifest.json").is_file()
    assert yaml.safe_load((out / "window.yaml").read_text())["mixer"] == {"type": "window"}
    before = (out / "window" / "report.json").stat().st_mtime_ns
    # a base that is gone: no run begins, and what is done stays
    (tmp_path / "base" / "config.json").rename(tmp_path / "config.json")
    assert table.main([*words, "--mixers", "window", "linear-attention", "--no-bench"]) == 1
    assert (out / "window" / "report.json").stat().st_mtime_ns == before
    found = json.loads((out / "table.json").read_text())
    assert list(found["runs"]) == ["window"]
    assert list(found["failed"]) == ["linear-attention"]
