"""What would fail after training is an error before training, and leaves no file. What is unlikely is a warning."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import save_tiny_base, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from liger_convert.cli import main
from liger_convert.config.recipe import load
from liger_convert.io import checkpoint
from liger_convert.pipeline import preflight, steps
from liger_convert.pipeline.plan import make_plan

STAGE = {"data": "text", "tokens": 256, "seq_len": 32, "batch_size": 2, "learning_rates": {"mixer": 1e-3}}
RECIPE = {
    "version": 1,
    "name": "tiny",
    "base": "base",
    "mixer": {"type": "gla", "window": 8, "sinks": 2},
    "device": "cpu",
    "precision": "float32",
    "data": {"text": {"source": "file", "path": "text.jsonl", "held_out": 0.3}},
    "stages": [STAGE | {"kind": "align"}],
    "eval": {"suite": "suite.yaml", "text": "text"},
}
ONE_STEP = (
    "stages[0]={kind: align, data: text, tokens: 32, seq_len: 32, batch_size: 1, warmup_ratio: 0.9, "
    "learning_rates: {mixer: 0.01}}"
)
SUITE = "description: tiny\ntext: [{window: 32, windows: 2}]\n"
PIQA = [{"goal": f"open box {i}", "sol1": "lift its lid", "sol2": f"sit on it {i}", "label": i % 2} for i in range(4)]
SQUAD = [{"context": f"Bob is {i}.", "question": "How old is Bob?", "answers": [str(i)]} for i in range(3)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("source") / "base")


@pytest.fixture
def home(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a run needs, as the working directory. A run ends where the conversion would begin."""
    shutil.copytree(source, tmp_path / "base")
    rows = [{"text": f"{i} bottles of beer on the wall, {i} bottles of beer. Take one down. "} for i in range(30)]
    lines(tmp_path / "text.jsonl", rows)
    (tmp_path / "suite.yaml").write_text(SUITE)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)

    def reached(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.convert, "convert_checkpoint", reached)
    return tmp_path


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words(*overrides: str) -> list[str]:
    return ["run", "recipe.yaml", "--out", "out", *(word for override in overrides for word in ("--set", override))]


def refused(arguments: list[str], capsys: Any, *says: str) -> None:
    capsys.readouterr()
    assert main.main(arguments) == 2
    output = capsys.readouterr().err
    (complaint,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert output.rstrip().endswith(complaint)
    for said in says:
        assert said in complaint
    assert not Path("out").exists()


def warned(arguments: list[str], capsys: Any, begin: str | tuple[str, ...] = "warning: ") -> list[str]:
    """The lines on stderr that begin so."""
    capsys.readouterr()
    assert main.main(arguments) == (130 if arguments[0] == "run" else 0)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(begin)]


def test_a_sound_run_is_warned_of_nothing(home: Path, capsys: Any) -> None:
    assert warned(words(), capsys) == []
    plan = json.loads((home / "out/manifest.json").read_text())["steps"]["plan"]["plan"]
    assert plan["warnings"] == []
    assert plan["disk_peak"] == max(plan["disk_peak"], *plan["disk_bytes"].values())


def test_few_softmax_layers_that_are_not_chosen_by_copying_are_a_warning(home: Path, capsys: Any) -> None:
    shutil.rmtree(home / "base")
    save_tiny_base("llama", home / "base", num_hidden_layers=8)

    def said(count: int, select: str) -> list[str]:
        layers = f"layers={{softmax_auto: {count}, select: {select}}}"
        return warned(["plan", "recipe.yaml", "--set", layers], capsys, "warning: layers.select")

    (warning,) = said(1, "kl")
    assert "with so few softmax layers (1 of 8), kl has lost recall from far back" in warning
    assert said(1, "copy") == said(2, "kl") == []


def test_tokens_that_begin_a_text_are_not_counted_as_text_to_measure(home: Path, capsys: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(home / "base")
    lines(home / "text.jsonl", [{"text": f"{i:04}"} for i in range(50)])
    lines(home / "held.jsonl", [{"text": f"{i:04}"} for i in range(100, 115)])
    held = "data.text={source: file, path: text.jsonl, validation: held.jsonl}"
    refused(words(held, "stages[0].concat_documents=true"), capsys, "60 tokens are held out, but suite suite needs 64")


def test_a_text_of_another_kind_needs_no_part_to_train_on(home: Path, capsys: Any) -> None:
    lines(home / "other.jsonl", [{"text": "a single document, which is long enough to measure on " * 3}])
    (home / "suite.yaml").write_text("description: x\ntext: [{window: 32, windows: 2, source: other}]\n")
    other = "data.other={source: file, path: other.jsonl, held_out: 0.5}"
    assert warned(words(other, "eval.other_text=other"), capsys) == []


# --- generation


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{{ raise_exception('give tools') }}",
            "a prompt with one user turn cannot be built: the chat template refuses these messages (give tools)",
        ),
        ("{{ messages[1]['content'] }}", "a prompt with one user turn cannot be built"),
        ("{% for m in messages %}", "the chat template has an error in line 1"),
        ("{# nothing #}", "does not show the text of a message"),
    ],
    ids=["needs tools", "needs two turns", "no Jinja", "nothing"],
)
@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_that_cannot_render_a_prompt_is_refused(
    home: Path, capsys: Any, template: str, says: str, where: str
) -> None:
    if where == "chat_template.jinja":
        (home / "base" / where).write_text(template)
    else:
        (home / "base/chat_template.jinja").unlink()
        path = home / "base" / where
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    refused(words(), capsys, f"base/{where}: ", says)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("{", "cannot be read as JSON"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ('{"cache_implementation": "nonsense"}', "cache_implementation"),
        ('{"num_beams": "four"}', "generation_config.json: "),
        ('{"num_return_sequences": 3}', "num_return_sequences"),
        ('{"stop_strings": ["x"]}', "tokenizer"),
        ('{"repetition_penalty": -1.0}', "penalty"),
        ('{"eos_token_id": 101}', "eos_token_id is 101; it should be the id of one of the 101 tokens"),
        ('{"eos_token_id": [2, "x"]}', "eos_token_id is 'x'"),
        ('{"eos_token_id": -1}', "eos_token_id is -1"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_refused(home: Path, capsys: Any, written: str, says: str) -> None:
    (home / "base/generation_config.json").write_text(written)
    refused(words(), capsys, "base/generation_config.json: ", says)


@pytest.mark.parametrize(
    "written",
    [
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.9}',
        '{"temperature": 0.6}',
        '{"max_length": 5}',
        '{"cache_implementation": "static"}',
        '{"prompt_lookup_num_tokens": 3}',
    ],
)
def test_a_generation_config_that_works_passes(home: Path, capsys: Any, written: str) -> None:
    (home / "base/generation_config.json").write_text(written)
    assert warned(words(), capsys) == []


def test_a_padding_token_that_there_is_not_is_a_warning(home: Path, capsys: Any) -> None:
    (home / "base/generation_config.json").write_text('{"pad_token_id": 300}')
    (warning,) = warned(words(), capsys)
    assert "pad_token_id is 300, which is not one of the 101 tokens" in warning


# --- the recipe


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages[0].learning_rates.mixer=1e-9", "stages[0].learning_rates.mixer: steps of 1e-09 are rounded away"),
        ("stages[0].learning_rates.mixer=1.5", "stages[0].learning_rates.mixer: steps of 1.5 wipe out weights"),
        ("stages[0].weight_decay=1000.0", "stages[0].weight_decay"),
        (ONE_STEP, "stages[0].warmup_ratio: the only step"),
        ("stages[0].seq_len=10", "rows of 10 tokens never reach beyond the window and its sinks (10 tokens)"),
        ("mixer.window=64", "use more than 66"),
        ("stages[0].lora={variant: pissa, rank: 17}", "stages[0].lora.rank: pissa takes 17 singular vectors of each"),
        ("stages[0].lora={targets: [q_prj]}", "no projection is called 'q_prj'; use some of "),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_recipe_whose_result_would_be_of_no_use_is_refused(
    home: Path, capsys: Any, override: str, says: str, command: str
) -> None:
    more = ["stages[0].learning_rates.lora=1e-3"] if "lora" in override else []
    arguments = words(override, *more)
    refused(arguments if command == "run" else ["plan", "recipe.yaml", *arguments[4:]], capsys, says)


def test_documents_that_never_leave_the_window_are_refused(home: Path, capsys: Any) -> None:
    lines(home / "short.jsonl", [{"text": f"beer {i:02}"} for i in range(60)])
    short = "data.short={source: file, path: short.jsonl}"
    says = "documents of short, of at most 7 tokens, never reach beyond the window and its sinks (10 tokens)"
    refused(words(short, "stages[0].data=short"), capsys, f"stages[0].data: {says}")
    (said,) = warned(words(short, "stages[0].data=short", "stages[0].concat_documents=true"), capsys)
    assert "stages[0].data: only 0.0% of the tokens of short have context of their own document beyond the win" in said


def test_concatenated_documents_of_which_enough_leave_the_window_are_no_warning(home: Path, capsys: Any) -> None:
    lines(home / "mixed.jsonl", [{"text": f"beer {i:02}"} for i in range(60)] + [{"text": "x" * 80}])
    mixed = ["data.mixed={source: file, path: mixed.jsonl}", "stages[0].data=mixed", "stages[0].concat_documents=true"]
    assert warned(words(*mixed), capsys) == []


def test_rows_that_are_left_out_are_told(home: Path, capsys: Any) -> None:
    rows = [json.loads(line) for line in (home / "text.jsonl").read_text().splitlines()]
    lines(home / "text.jsonl", [*rows, {"text": " "}, {"text": ""}])
    (warning,) = warned(words(), capsys)
    assert warning.endswith("data.text: 2 of 32 rows have no text")


def test_rows_without_any_response_are_told(home: Path, capsys: Any) -> None:
    """Their loss is 0, which looks as if all were learned."""
    chat = "data.chat={source: file, path: chat.jsonl, format: messages}"
    stage = "stages=[{kind: finetune, data: chat, tokens: 640, seq_len: 20, learning_rates: {mixer: 1e-3}}]"
    for asked, silent in ((180, True), (8, False)):
        turns = [{"role": "user", "content": "q" * asked}, {"role": "assistant", "content": "a"}]
        lines(home / "chat.jsonl", [{"messages": turns}] * 30)
        found = [said for said in warned(words(chat, stage), capsys) if "hold no response" in said]
        assert len(found) == silent
        shutil.rmtree("out")
        if silent:  # a chat of some 210 tokens has its response in one of ten rows, or in two
            share = int(found[0].partition("stages[0].data: ")[2].partition("%")[0])
            assert 80 <= share <= 91


def test_weights_of_rows_are_told_to_be_without_effect(home: Path, capsys: Any) -> None:
    rows = [json.loads(line) for line in (home / "text.jsonl").read_text().splitlines()]
    lines(home / "text.jsonl", [rows[0] | {"weight": 0}, *(row | {"weight": 1} for row in rows[1:])])
    (warning,) = warned(words(), capsys)
    assert "data.text: 1 of 30 rows have a weight of their own, but all rows count alike" in warning


def test_documents_that_are_trained_on_and_measured_are_told(home: Path, capsys: Any) -> None:
    rows = [json.loads(line) for line in (home / "text.jsonl").read_text().splitlines()]
    lines(home / "mine.jsonl", [{"text": f"{row['text']} Pass it around. "} for row in rows])
    (home / "other.yaml").write_text("description: x\ntext: [{source: other, window: 32, windows: 2}]\n")
    mine = ["data.mine={source: file, path: mine.jsonl, validation: new.jsonl}", "eval.text=mine"]
    other = ["data.new={source: file, path: new.jsonl}", "eval.other_text=new", "eval.suite=other.yaml"]
    new = [{"text": f"{row['text']} And so on. "} for row in rows]
    for field, name, overrides in (("text", "mine", mine), ("other_text", "new", other)):
        lines(home / "new.jsonl", new)
        assert warned(words(*overrides), capsys) == []
        lines(home / "new.jsonl", new + rows)
        shutil.rmtree(home / "out")
        told = f"of the 60 documents of {name} that are measured are also in text, which is trained on"
        (warning,) = warned(words(*overrides), capsys)
        found = re.fullmatch(f"warning: eval.{field}: (.*) {told}; take them out of one of the two", warning)
        assert found is not None
        assert 15 < int(found[1]) < 30, "those of text that are not held out"
        shutil.rmtree(home / "out")


def test_tools_that_the_chat_template_does_not_show_are_told(home: Path, capsys: Any) -> None:
    chat = [{"role": "user", "content": "Count to nine. " * 9}, {"role": "assistant", "content": "one two three " * 9}]
    lines(home / "chat.jsonl", [{"messages": chat, "tools": [{"name": "count"}]}] * 30)
    source = "data.chat={source: file, path: chat.jsonl, format: messages}"
    (warning,) = warned(words(source, "stages[0].data=chat"), capsys)
    assert "data.chat: its rows have tools, but the base's chat template does not show them" in warning


def test_roles_that_the_chat_template_does_not_show_are_told(home: Path, capsys: Any) -> None:
    template = home / "base/chat_template.jinja"
    template.write_text(template.read_text().replace("in messages %}", "in messages if m['role'] != 'system' %}"))
    chat = [{"role": "user", "content": "Count to nine. " * 9}, {"role": "assistant", "content": "one two three " * 9}]
    lines(home / "chat.jsonl", [{"messages": [{"role": "system", "content": "Be brief."}, *chat]}] * 30)
    source = "data.chat={source: file, path: chat.jsonl, format: messages}"
    (warning,) = warned(words(source, "stages[0].data=chat"), capsys)
    assert "data.chat: the base's chat template does not show messages of the role system, so the model" in warning


def test_text_that_the_tokenizer_cannot_read_is_told(home: Path, capsys: Any) -> None:
    tokenizer = json.loads((home / "base/tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<unk>"] = tokenizer["model"]["vocab"].pop("~")
    (home / "base/tokenizer.json").write_text(
        json.dumps(tokenizer | {"model": tokenizer["model"] | {"unk_token": "<unk>"}})
    )
    config = json.loads((home / "base/tokenizer_config.json").read_text())
    (home / "base/tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<unk>"}))
    assert warned(words(), capsys) == []
    lines(home / "text.jsonl", [{"text": "日本語の文章です。" * (20 + i)} for i in range(30)])
    shutil.rmtree(home / "out")
    (said,) = [warning for warning in warned(words(), capsys) if "data.text:" in warning]
    assert "100% of its tokens are the unknown token of the base's tokenizer, which cannot read this text" in said


def test_text_that_is_read_over_and_over_is_told(home: Path, capsys: Any) -> None:
    (warning,) = warned(words("stages[0].tokens=65536"), capsys)
    said = r"stages\[0\]\.data: text has 1,\d{3} tokens, so the stage reads it \d+\.\d times; give it more text or the"
    assert re.search(said, warning)
    shutil.rmtree(home / "out")
    assert warned(words("stages[0].tokens=8192"), capsys) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["stages[0].seq_len=128", "stages[0].tokens=1024"], ""),
        (["stages[0].seq_len=512", "stages[0].tokens=1024"], "512 is more than the 256 tokens that the base supports"),
        (
            ["data.own={source: teacher, tokens: 1024, document_tokens: 512}"],
            "data.own.document_tokens: 512 is more than",
        ),
        (["stages[0].learning_rates.mixer=0.2"], "0.2 is high"),
        (["stages[0].learning_rates.mixer=2e-8"], "4 steps of 2e-08 move no weight by more than 8e-08"),
        (["stages[0].warmup_ratio=0.99"], "covers all 4 steps"),
        (["stages[0].max_grad_norm=1e-9"], "Adam's epsilon"),
        (["mixers.wide={type: gla, window: 40}", "layers=[main, wide, main]"], "the longest window and its sinks"),
        (["mixers.long={type: gla, window: 40}", "layers=[main, long, main]"], "the longest window and its sinks"),
        (["layers={softmax: [0], long_windows: {layers: [2], window: 40}}"], ""),
        (["eval.suite=long.yaml", "data.text.held_out=0.5"], "copy_nll_130 reads 260 tokens, more than the 256"),
    ],
)
def test_a_recipe_that_is_unlikely_to_do_well_is_told(home: Path, capsys: Any, overrides: list[str], says: str) -> None:
    (home / "long.yaml").write_text("description: long\ncopying: [{length: 130, draws: 2}]\n")
    found = warned(words(*overrides), capsys)
    assert len(found) == bool(says)
    assert all(says in warning for warning in found)
    assert warned(["plan", "recipe.yaml", *words(*overrides)[4:]], capsys) == found
    plan = json.loads((home / "out/manifest.json").read_text())["steps"]["plan"]["plan"]
    assert [f"warning: {warning}" for warning in plan["warnings"]] == found


# --- the suite


def rows(name: str, values: list[dict[str, Any]]) -> Callable[[Path], object]:
    return lambda folder: lines(folder / "rows" / f"{name}.jsonl", values)


@pytest.mark.parametrize(
    ("tasks", "prepare", "says"),
    [
        (
            "{name: piqa, metrics: [acc]}",
            rows("piqa", [PIQA[0] | {"label": -1}]),
            "piqa.jsonl line 1: does not fit task piqa: its label -1",
        ),
        (
            "{name: piqa, metrics: [acc]}",
            rows("piqa", [*PIQA, PIQA[0] | {"label": 7}]),
            "line 5: does not fit task piqa: its label 7 is not one of its 2 choices",
        ),
        ("{name: piqa, metrics: [acc]}", rows("piqa", [{"goal": "x"}]), "line 1: does not fit task piqa"),
        ("{name: piqa, metrics: [acc]}", rows("piqa", []), "piqa"),
        ("{name: piqa, metrics: [f1]}", rows("piqa", PIQA), "has no metric 'f1'"),
        ("{name: piqa, metrics: [acc], shots: 2}", rows("piqa", PIQA), "no local file to draw shots from"),
        (
            "{name: squad_ctx, metrics: [contains]}",
            rows("squad_1k", [SQUAD[0] | {"answers": 3}]),
            "line 1: does not fit",
        ),
    ],
    ids=["hidden label", "label of no choice", "missing field", "no row", "metric", "shots", "answers"],
)
def test_a_suite_that_its_rows_do_not_fit_is_refused(
    home: Path, capsys: Any, tasks: str, prepare: Callable[[Path], object], says: str
) -> None:
    (home / "rows").mkdir()
    prepare(home)
    (home / "suite.yaml").write_text(f"{SUITE}tasks: [{tasks}]\n")
    refused(words("eval.data=rows"), capsys, "piqa" if "piqa" in tasks else "squad_ctx", says)


def test_what_a_run_leaves_out_of_its_suite_is_a_note_and_no_warning(home: Path, capsys: Any) -> None:
    (home / "suite.yaml").write_text(SUITE + "copying: [{lengths: [16, 300]}]\npositions: [{window: 512}]\n")
    curve, positions, *warnings = sorted(warned(words("data.text.held_out=0.6"), capsys, ("note: ", "warning: ")))
    assert curve.startswith("note: suite suite: copy_nll_300: left out because repeated once, they are longer than")
    assert positions == "note: suite suite: text_nll_at_512: left out because the base supports only 256 tokens"
    assert warnings == json.loads((home / "out/manifest.json").read_text())["steps"]["plan"]["plan"]["warnings"] == []


def test_text_of_another_kind_is_read_before_the_training(home: Path, capsys: Any) -> None:
    lines(home / "far.jsonl", [{"text": "Far out."}])
    (home / "suite.yaml").write_text("description: x\ntext: [{source: other, window: 32}]\n")
    far = ["data.far={source: file, path: far.jsonl}", "eval.other_text=far"]
    refused(words(*far), capsys, "data.far: has 8 tokens, but suite suite needs 64")
    lines(home / "far.jsonl", [{"text": "Far out. " * 9}])
    assert warned(words(*far), capsys) == []


def test_a_run_that_trains_on_the_documentation_has_no_text_of_another_kind(home: Path, capsys: Any) -> None:
    (home / "suite.yaml").write_text(SUITE[:-1].replace("}]", "}, {source: other}]") + "\n")
    (note,) = warned(words("data.text={source: pydoc, held_out: 0.01}"), capsys, "note: suite")
    assert "other_ppl, other_byte_ppl: left out because there is no text of another kind" in note


def test_prompts_need_text_of_some_kind(home: Path, capsys: Any) -> None:
    (home / "suite.yaml").write_text("description: x\nagreement: {prompts: 2, prompt_tokens: 16, tokens: 4}\n")
    assert warned(words("eval={suite: suite.yaml}"), capsys) == []  # they are Python's documentation
    shutil.rmtree(home / "out")
    said = "eval.text: suite suite needs held-out text"
    refused(words("data.text={source: pydoc}", "eval={suite: suite.yaml}"), capsys, said)


def test_rows_beyond_the_limit_are_not_looked_at(home: Path, capsys: Any) -> None:
    (home / "rows").mkdir()
    lines(home / "rows/piqa.jsonl", [*PIQA, PIQA[0] | {"label": -1}])
    (home / "suite.yaml").write_text(SUITE + "tasks: [{name: piqa, metrics: [acc]}]\n")
    refused(words("eval.data=rows", "eval.limit=1000"), capsys, "line 5: does not fit task piqa: its label -1")
    assert warned(words("eval.data=rows", "eval.limit=4"), capsys) == []


def test_answers_longer_than_the_base_are_refused(home: Path, capsys: Any) -> None:
    (home / "rows").mkdir()
    lines(home / "rows/squad_1k.jsonl", SQUAD)
    (home / "suite.yaml").write_text(SUITE + "tasks: [{name: squad_ctx, metrics: [contains]}]\n")
    path = home / "base/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 48}))
    refused(words("eval.data=rows"), capsys, "answers take 48 tokens, but the base supports only 48 in all")


def test_a_task_that_the_hub_does_not_give_is_refused(home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    (home / "suite.yaml").write_text(SUITE + "tasks: [{name: piqa, metrics: [acc]}]\n")
    refused(words(), capsys, "task piqa: its data cannot be fetched from the hub", "no route to the hub")


# --- the disk


def test_a_run_that_does_not_fit_on_the_disk_is_refused(
    home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_plan(load("recipe.yaml"), checkpoint.load_config(home / "base"))
    usage = namedtuple("usage", "total used free")
    for free, fits in ((made.disk_peak - 1, False), (made.disk_peak, True)):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path, free=free: usage(10**9, 0, free))
        if fits:
            assert warned(words(), capsys) == []
        else:
            refused(words(), capsys, "of disk at its peak, but only ", "are free; free some space")


def test_a_source_of_a_mix_that_is_read_over_and_over_is_a_warning(home: Path, capsys: Any) -> None:
    lines(home / "few.jsonl", [{"text": "x" * 40}])
    few = "data.few={source: file, path: few.jsonl}"
    mix = "stages[0].data={text: 0.5, few: 0.5}"
    (said,) = warned(words(few, mix, "stages[0].tokens=512"), capsys)
    assert "stages[0].data.few: few has 40 tokens, so the stage reads it 6.4 times; give it more text" in said
    assert warned([*words(few, mix), "--out", "again"], capsys) == []  # 256 tokens: 3.2 times


def test_a_mix_needs_one_source_that_leaves_the_window(home: Path, capsys: Any) -> None:
    lines(home / "short.jsonl", [{"text": "x" * 6}] * 20)
    lines(home / "shorter.jsonl", [{"text": "y" * 5}] * 20)
    both = ["data.short={source: file, path: short.jsonl}", "data.shorter={source: file, path: shorter.jsonl}"]
    said = "stages[0].data: documents of short and shorter, of at most 6 tokens, never reach beyond the window"
    refused(words(*both, "stages[0].data={short: 0.5, shorter: 0.5}", "stages[0].tokens=128"), capsys, said)
    assert warned(words(*both, "stages[0].data={short: 0.5, text: 0.5}", "stages[0].tokens=128"), capsys) == []
