"""Tasks in lm-eval's own schemas: local rows are asked and scored as lm-eval does, and so are tasks of a folder."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tasks import log_likelihood, run, suite, write_rows
from tiny import closing_tokenizer, save_tiny_base, tiny_tokenizer
from transformers import GenerationConfig
from worlds import World

from liger_convert.cli import main
from liger_convert.eval import harness, suites, task_files
from liger_convert.eval.evaluation import evaluate_model
from liger_convert.eval.generation import generate, load_model
from liger_convert.eval.harness import rehearse_tasks
from liger_convert.eval.suites import Suite
from liger_convert.utils.errors import BadInput


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(save_tiny_base("llama", tmp_path_factory.mktemp("base")), torch.device("cpu"), "float32")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows")


# a row of each task whose first answer is right, in lm-eval's own schema, and what its prompt ends in
SPAN = {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": ["Bob"]}
STOCK_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "boolq": ({"passage": "Bob is old.", "question": "is bob old", "label": 0}, "Question: is bob old?\nAnswer:"),
    "sciq": (
        {"support": "", "question": "What?", "correct_answer": "no", "distractor1": "a", "distractor2": "b"}
        | {"distractor3": "c"},
        "Question: What?\nAnswer:",
    ),
    "openbookqa": (
        {"question_stem": "The sun is", "choices": {"text": ["hot", "a cat"], "label": ["A", "B"]}, "answerKey": "A"},
        "The sun is",
    ),
    "arc_challenge": (
        {"question": "The sun is", "choices": {"text": ["hot", "a cat"], "label": ["A", "B"]}, "answerKey": "A"},
        "Question: The sun is\nAnswer:",
    ),
    "winogrande": ({"sentence": "Ann is old, _ sat.", "option1": "Bob", "option2": "Ann or Bob", "answer": "1"}, "Bob"),
    "ifeval": (
        {"key": 1, "prompt": "Say bob.", "instruction_id_list": ["keywords:existence"]}
        | {"kwargs": [{"keywords": ["bob"]}]},
        "Say bob.",
    ),
    "gsm8k": ({"question": "1 + 1?", "answer": "It is 2.\n#### 2"}, "Question: 1 + 1?\nAnswer:"),
    "drop": (
        {"query_id": "1", "passage": "Bob sat.", "question": "Who?", "answer": SPAN}
        | {"validated_answers": {"number": [""], "date": [SPAN["date"]], "spans": [["Bob"]]}},
        "Bob sat. Who?",
    ),
    "drop_ctx": ({"context": "Bob sat.", "question": "Who?", "answers": ["Bob"]}, "Question: Who?\nAnswer:"),
    "swde": ({"text": " Bob sat. Name:", "value": "Bob "}, "Bob sat. Name:"),
    "fda": ({"text": " Bob sat. Name:", "value": "Bob "}, "Bob sat. Name:"),
    "niah_s3_8192": ({"input": "The number is", "answers": ["Bob"]}, "The number is"),
}
METRIC = {"gsm8k": "exact_match", "drop": "em", "ifeval": "prompt_level_strict_acc"}
METRIC |= dict.fromkeys(("boolq", "sciq", "openbookqa", "arc_challenge", "winogrande"), "acc")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", STOCK_ROWS)
def test_a_task_with_local_rows_asks_and_scores_as_lm_eval_does(
    model: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_convert.eval import harness

    row, prompt = STOCK_ROWS[name]
    stem = suites.LOCAL_FILES[name]["test"]
    (tmp_path / f"{stem}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    task = {"name": name, "metrics": [METRIC.get(name, "contains")]}
    said = {"gsm8k": " It is 2.\n#### 2", "drop": "Bob"}.get(name, " It was bob, I think.")
    asked = []

    def answers(right: bool) -> None:
        def likelihoods(self: Any, requests: list) -> list:
            asked.extend(request.args[0] for request in requests)
            last = 3 if name == "sciq" else 0  # which of the choices is the right one
            return [(float((request.idx == last) == right), False) for request in requests]

        def generated(self: Any, requests: list) -> list:
            asked.extend(request.args[0] for request in requests)
            return [said if right else "nobody" for _ in requests]

        monkeypatch.setattr(harness._Harness, "loglikelihood", likelihoods)
        monkeypatch.setattr(harness._Harness, "generate_until", generated)

    suites.check_data(suite(tasks=[task]), tmp_path, None)
    for right in (True, False):
        answers(right)
        found = run(model, tmp_path, [task])
        assert {measured["value"] for measured in found.values()} == {float(right)}, found
        assert {measured["n"] for measured in found.values()} == {2}
    assert all(text.endswith(prompt) for text in asked)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 1}, {"num_beams": 3}])
def test_an_answer_is_greedy_text_whatever_the_models_own_settings_are(
    model: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    prompt = " Bob sat. Name:"
    said = generate(model, tiny_tokenizer(), prompt.strip(), max_new_tokens=8, chat=False)
    assert len(said) > 4
    (tmp_path / "swde.jsonl").write_text(json.dumps({"text": prompt, "value": said}) + "\n")
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=2, **settings)
    try:
        found = run(model, tmp_path, [{"name": "swde", "metrics": ["contains"]}])
    finally:
        model.generation_config = own
    assert found["swde/contains"]["value"] == 1.0


def test_a_task_asks_and_scores_the_same_where_the_tokenizer_puts_an_end_behind_every_text(
    model: Any, rows: Path
) -> None:
    prompt = " Bob sat. Name:"
    said = generate(model, tiny_tokenizer(), prompt.strip(), max_new_tokens=8, chat=False)
    long = "x" * 300 + prompt  # more than the model's context, so its beginning is cut off
    asked = [{"text": text, "value": said} for text in (prompt, f"Bob sat. {prompt}", long)]
    (rows / "swde.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    names = {"swde": "contains", "piqa": "acc", "lambada_openai": "perplexity", "wikitext": "word_perplexity"}
    tasks = suite(tasks=[{"name": name, "metrics": [metric]} for name, metric in names.items()])
    plain, closing = (
        evaluate_model(model, tokenizer, tasks, data_dir=rows, batch_size=2, precision="float32")
        for tokenizer in (tiny_tokenizer(), closing_tokenizer())
    )
    assert plain["swde/contains"]["value"] > 0
    assert {name: found["value"] for name, found in closing.items()} == pytest.approx(
        {name: found["value"] for name, found in plain.items()}
    )


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("boolq", {"label": -1}, "its label -1 is not one of its 2 choices"),
        ("openbookqa", {"answerKey": "C"}, "ValueError"),
        ("openbookqa", {"choices": {"text": ["hot", " "], "label": ["A", "B"]}}, "an answer is empty"),
        ("swde", {"value": " "}, "`value` should be a text"),
        ("drop_ctx", {"answers": "Bob"}, "`answers` should be a list of texts"),
        ("drop_ctx", {"answers": []}, "`answers` should be a list of texts"),
        ("drop_ctx", {"answers": {"text": ["Bob"]}}, "`answers` should be a list of texts"),
        ("drop_ctx", {"answers": ["Bob", ""]}, "`answers` should be a list of texts, none of them empty"),
        ("gsm8k", {"question": None}, ""),
        (
            "ifeval",
            {"instruction_id_list": ["length_constraints:number_sentences"]},
            "length_constraints:number_sentences is scored with nltk's data punkt_tab, which is not installed; run",
        ),
    ],
)
def test_a_row_that_does_not_fit_its_task_is_named(
    tmp_path: Path, name: str, change: dict, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nltk.data.path", [])
    row, stem = STOCK_ROWS[name][0], suites.LOCAL_FILES[name]["test"]
    if name == "gsm8k":
        row, change = {"query": row["question"], "answer": row["answer"]}, {}
    (tmp_path / f"{stem}.jsonl").write_text(json.dumps(row | change) + "\n")
    with pytest.raises(BadInput, match=rf"{stem}.jsonl line 1: does not fit task {name}: .*{says}"):
        suites.check_data(suite(tasks=[{"name": name, "metrics": [METRIC.get(name, "contains")]}]), tmp_path, None)


def test_a_task_whose_package_is_not_there_says_so(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("immutabledict", "langdetect"):
        monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    row = {"key": 1, "prompt": "Say no.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": None}]}
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        BadInput, match=r"task ifeval: needs a package that is not installed: .*(immutabledict|langdetect)"
    ):
        run(model, tmp_path, [{"name": "ifeval", "metrics": ["prompt_level_strict_acc"]}])


def test_shots_of_gsm8k_need_their_own_file(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_convert.eval import harness

    asked: list[str] = []
    monkeypatch.setattr(
        harness._Harness, "generate_until", lambda self, rs: asked.extend(r.args[0] for r in rs) or ["#### 2"] * len(rs)
    )
    row = STOCK_ROWS["gsm8k"][0]
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
    task = {"name": "gsm8k", "shots": 2, "metrics": ["exact_match"]}
    with pytest.raises(BadInput, match=r"has no gsm8k_train.jsonl \(or .jsonl.xz, .jsonl.gz\), which task gsm8k reads"):
        run(model, tmp_path, [task])
    (tmp_path / "gsm8k_train.jsonl").write_text(
        "".join(json.dumps(row | {"question": f"{i}?"}) + "\n" for i in range(4))
    )
    assert set(run(model, tmp_path, [task])) == {
        "gsm8k/exact_match,strict-match",
        "gsm8k/exact_match,flexible-extract",
    }
    assert asked[0].count("Answer:") == 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somebody's own tasks: a choice, a group of it, one that takes a known name, and one whose rows are not there."""
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = [{"q": f"open box {i}", "a": ["lift its lid", "sit on it"], "right": i % 2} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text("def ask(doc):\n    return doc['q'] + '!'\n")
    own = {
        "output_type": "multiple_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "doc_to_target": "right",
        "doc_to_choice": "a",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1.0},
    }
    lost = own | {"dataset_kwargs": {"data_files": {"test": str(folder / "lost.jsonl")}}}
    for name, config in {"boxes": own, "winogrande": own, "lost": lost}.items():
        text = yaml.safe_dump({"task": name} | config) + "doc_to_text: !function score.ask\n"
        (folder / f"{name}.yaml").write_text(text)
    return folder


def included(folder: Path, *names: str) -> Suite:
    from liger_convert.eval.task_files import included_tasks

    tasks = [{"name": name, "metrics": ["acc"]} for name in names]
    return suite(tasks=tasks).with_tasks_of(folder, included_tasks(folder, names))


def test_tasks_of_a_folder_read_what_their_own_yaml_says(model: Any, rows: Path, folder: Path) -> None:
    mixed = included(folder, "boxes", "piqa", "winogrande")
    suites.check_data(mixed, rows, None)
    found = evaluate_model(model, tiny_tokenizer(), mixed, data_dir=rows, precision="float32")
    right = []
    for i in range(6):
        scores = [log_likelihood(model, f"open box {i}!", f" {answer}") for answer in ("lift its lid", "sit on it")]
        right.append(int(np.argmax(scores)) == i % 2)
    assert found["boxes/acc"]["value"] == found["winogrande/acc"]["value"] == pytest.approx(np.mean(right))
    assert found["boxes/acc"]["n"] == 6
    assert found["piqa/acc"] == run(model, rows, [{"name": "piqa", "metrics": ["acc"]}])["piqa/acc"]


def test_a_suite_file_may_name_the_folder_itself(model: Any, folder: Path) -> None:
    tasks = [{"name": "boxes", "metrics": ["acc"], "needs_data": True, "include_path": str(folder)}]
    assert set(run(model, None, tasks)) == {"boxes/acc"}


def test_shots_that_a_suite_leaves_out_are_those_of_the_tasks_own_yaml(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "boxes.yaml").open("a").write("num_fewshot: 2\nfewshot_split: test\n")
    seen: list[str] = []

    def note(_self: Any, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        seen.extend(texts[0] for texts, _, _ in requests)
        return [(-1.0, False)] * len(requests)

    monkeypatch.setattr(harness._Harness, "_loglikelihood_tokens", note)
    for more in ({}, {"shots": 0}):
        run(model, None, [{"name": "boxes", "metrics": ["acc"], "include_path": str(folder)} | more])
    assert [text.count("open box") for text in seen] == [3] * 12 + [1] * 12


def test_a_task_that_samples_gives_the_same_score_again(model: Any, folder: Path) -> None:
    (folder / "score.py").open("a").write("def size(doc, results):\n    return {'size': sum(map(ord, results[0]))}\n")
    settings = {"max_gen_toks": 8, "until": ["@"], "do_sample": True, "temperature": 5.0}
    task = yaml.safe_load((folder / "boxes.yaml").read_text().replace("!function ", ""))
    task |= {
        "output_type": "generate_until",
        "generation_kwargs": settings,
        "doc_to_target": "x",
        "doc_to_text": "{{q}}",
    }
    task |= {"metric_list": [{"metric": "size", "aggregation": "mean", "higher_is_better": True}]}
    (folder / "boxes.yaml").write_text(yaml.safe_dump(task) + "process_results: !function score.size\n")
    sampled = [{"name": "boxes", "metrics": ["size"], "include_path": str(folder)}]
    assert run(model, None, sampled) == run(model, None, sampled)


@pytest.mark.parametrize(
    ("prepare", "names", "says"),
    [
        (lambda folder: None, ["piqa"], "has no task of suite test; the tasks there are boxes, lost, winogrande"),
        (lambda folder: None, ["lost"], "task lost of .*mine: cannot be loaded"),
        (
            lambda folder: (folder / "rows.jsonl").open("a").write('{"q": "x", "a": ["b", "c"], "right": 7}\n'),
            ["boxes"],
            "row 7 of split test: does not fit task boxes: its label 7 is not one of its 2 choices",
        ),
        (lambda folder: (folder / "score.py").write_text("import nothing_of_the_kind\n"), ["boxes"], "needs a package"),
        (lambda folder: (folder / "x.yaml").write_text("a: 1\nb: [\n"), ["boxes"], "x.yaml: line 3: not valid YAML"),
        (
            lambda folder: (folder / "x.yaml").write_text("task: boxes\n"),
            ["boxes"],
            "x.yaml: has the name boxes, as .*boxes.yaml has; name them apart",
        ),
        (
            lambda folder: (folder / "boxes.yaml").write_text("task: boxes\ninclude: gone.yaml\n"),
            ["boxes"],
            "boxes.yaml: lm-eval cannot read it; does it include",
        ),
        (
            lambda folder: (folder / "x.yaml").write_text("task: 3\n"),
            ["piqa"],
            "lm-eval cannot list its tasks; is each name a text",
        ),
    ],
)
def test_a_folder_of_tasks_that_cannot_be_used_is_one_sentence(
    folder: Path, prepare: Any, names: list[str], says: str
) -> None:
    prepare(folder)
    with pytest.raises(BadInput, match=says):
        suites.check_data(included(folder, *names), None, None)
    with pytest.raises(BadInput, match="is not a folder; name one with the YAML files"):
        included(folder / "rows.jsonl", "boxes")


def rewritten(folder: Path, **changes: Any) -> Suite:
    task = folder / "boxes.yaml"
    written = yaml.safe_load(task.read_text().replace("!function ", "")) | changes
    task.write_text(yaml.safe_dump(written).replace("score.ask", "!function score.ask"))
    return included(folder, "boxes")


@pytest.mark.parametrize("name", ["boxes", "derived", "group", "tag"])
@pytest.mark.parametrize("written", ["test_split: test\n", "metadata: {num: 1, num: 2}\n"], ids=["top", "inside"])
def test_a_key_that_appears_twice_is_refused_in_a_task_and_in_what_it_is_made_of(
    folder: Path, name: str, written: str
) -> None:
    (folder / "derived.yaml").write_text("task: derived\ninclude: boxes.yaml\n")
    (folder / "group.yaml").write_text("group: group\ntask: [{group: inner, task: [{task: derived}]}]\n")
    (folder / "tagged.yaml").write_text("task: tagged\ntag: tag\ninclude: boxes.yaml\n")
    suites.check_data(included(folder, "winogrande", "derived"), None, None)
    task = folder / "boxes.yaml"
    task.write_text(task.read_text().replace("metadata:\n  version: 1.0\n", "") + written)
    key = "num" if "num" in written else "test_split"
    says = rf"^{re.escape(str(task))}: line \d+: not valid YAML: the key '{key}' appears twice$"
    with pytest.raises(BadInput, match=says):
        suites.check_data(included(folder, name), None, None)
    suites.check_data(included(folder, "winogrande"), None, None)  # reads none of these files


def test_files_of_lm_eval_itself_may_say_a_key_twice(tmp_path: Path) -> None:
    stock = task_files.STOCK / "tinyBenchmarks/tinyMMLU.yaml"
    assert stock.read_text().count("num_fewshot") == 2
    (tmp_path / "own.yaml").write_text(f"task: own\ninclude: {stock}\n")
    own = suites.Task(name="own", metrics=["acc"], include_path=str(tmp_path))
    assert "own" in task_files.task_managers([own], None, tmp_path)[str(tmp_path)].task_index


def test_a_key_that_appears_twice_is_refused_in_a_suite(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("description: x\ntasks:\n- {name: piqa, name: boolq, metrics: [acc]}\n")
    with pytest.raises(BadInput, match=r"s\.yaml: line 3: not valid YAML: the key 'name' appears twice$"):
        suites.load(str(tmp_path / "s.yaml"))


def test_an_answer_without_tokens_is_refused_before_and_while_a_model_answers(model: Any, folder: Path) -> None:
    empty = rewritten(folder, output_type="loglikelihood", target_delimiter="", doc_to_target="{{q[:0]}}")
    with pytest.raises(BadInput, match="task boxes: the answer '' has no tokens"):
        rehearse_tasks(empty.tasks, tiny_tokenizer(), data_dir=None, limit=None, positions=256, report=lambda *_: None)
    with pytest.raises(BadInput, match="task boxes: the answer '' has no tokens"):
        evaluate_model(model, tiny_tokenizer(), empty, data_dir=None, precision="float32")


def test_a_metric_that_cannot_score_the_answers_is_named_by_its_task(model: Any, folder: Path) -> None:
    long = rewritten(
        folder, output_type="loglikelihood", doc_to_target="{{q * 20}}", metric_list=[{"metric": "perplexity"}]
    )
    long = long.model_copy(update={"tasks": [long.tasks[0].model_copy(update={"metrics": ["perplexity"]})]})
    with pytest.raises(BadInput, match="task boxes: its metrics cannot score these answers: OverflowError: math range"):
        evaluate_model(model, tiny_tokenizer(), long, data_dir=None, precision="float32")


@pytest.mark.parametrize("where", ["import", "prompt", "score"])
def test_python_of_a_task_that_exits_is_one_sentence(model: Any, folder: Path, where: str) -> None:
    exits = "import sys\ndef ask(doc):\n    return 'x'\ndef size(doc, results):\n    sys.exit('none')\n"
    exits = exits.replace("return 'x'", "sys.exit('none')") if where == "prompt" else exits
    (folder / "score.py").write_text(exits + "sys.exit('none')\n" * (where == "import"))
    task = (folder / "boxes.yaml").read_text()
    (folder / "boxes.yaml").write_text(task + "process_results: !function score.size\n")
    own = included(folder, "boxes")
    says = r"^task boxes: its Python ends the program \(sys\.exit, 'none'\); let it raise an error or return a value$"
    if where != "score":  # no row is scored there
        with pytest.raises(BadInput, match=says):
            suites.check_data(own, None, None)
    with pytest.raises(BadInput, match=says):
        rehearse_tasks(own.tasks, tiny_tokenizer(), data_dir=None, limit=None, positions=256, report=lambda *_: None)
    with pytest.raises(BadInput, match=says):
        evaluate_model(model, tiny_tokenizer(), own, data_dir=None, precision="float32")


@pytest.mark.parametrize("command", ["eval", "diagnose"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"generation_kwargs": {"max_gen_toks": 256}},
            "answers take 256 tokens, but the base supports only 256 in all",
        ),
        ({"generation_kwargs": {"until": ["x"]}}, "answers take 256 tokens"),  # lm-eval's default
        ({"generation_kwargs": {"max_gen_toks": 0}}, "generation_kwargs.max_gen_toks: should be at least 1, not 0"),
        ({"generation_kwargs": {"max_gen_toks": "few"}}, "generation_kwargs: invalid literal for int"),
        ({"generation_kwargs": {"until": 5, "max_gen_toks": 4}}, "generation_kwargs.until: should be a text"),
        ({"generation_kwargs": {"max_gen_toks": 4, "topp": 0.5}}, "generation_kwargs.topp: transformers has no such"),
        *(
            ({"generation_kwargs": {"max_gen_toks": 4, **settings}}, f"task asked: generation_kwargs{says}")
            for settings, says in [
                (
                    {"do_sample": True, "temperature": -1.0},
                    ": `temperature` .* has to be a strictly positive float",
                ),
                ({"num_beams": "two"}, ": '>' not supported between"),
                ({"num_return_sequences": 2}, ": Greedy methods .* without beam search"),
                ({"cache_implementation": "static"}, ".cache_implementation: is not supported; leave it out"),
            ]
        ),
        (
            {"filter_list": [{"name": "x", "filter": [{"function": "regex", "regex_pattern": "([0-9"}]}]},
            "task asked: .*unterminated character set",
        ),
    ],
)
def test_a_task_that_no_model_can_do_is_refused_before_a_model_is_loaded(
    world: World, command: str, change: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    task = {
        "task": "asked",
        "output_type": "generate_until",
        "custom_dataset": "!function rows.splits",
        "test_split": "test",
        "doc_to_text": "q",
        "doc_to_target": "a",
        "generation_kwargs": {"max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    own = world.folder / "own"
    own.mkdir()
    (own / "asked.yaml").write_text(
        yaml.safe_dump(task | change).replace("'!function rows.splits'", "!function rows.splits")
    )
    (own / "rows.py").write_text(
        "import datasets\ndef splits(**_):\n    return {'test': datasets.Dataset.from_list([{'q': 'x', 'a': 'y'}])}\n"
    )
    (world.folder / "s.yaml").write_text("description: x\ntasks: [{name: asked, metrics: [exact_match]}]\n")
    model = world.base if command == "eval" else world.linearized()
    monkeypatch.setattr("liger_convert.cli.measuring.generation.load_model", None)
    assert main.main([command, str(model), "--suite", "s.yaml", "--include-path", "own"]) == 2
    assert re.search(says, capsys.readouterr().err)
