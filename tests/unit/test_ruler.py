"""RULER's tasks: texts as long as the model's own tokenizer says, of local files, with no network."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wonderwords
from tiny import save_tiny_base, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from liger_convert.cli import main
from liger_convert.eval import harness, ruler, suites
from liger_convert.eval.evaluation import evaluate_model
from liger_convert.eval.generation import load_model
from liger_convert.eval.harness import rehearse_tasks
from liger_convert.eval.narrow import narrow
from liger_convert.eval.suites import Suite
from liger_convert.pipeline.pages import curves
from liger_convert.utils.errors import BadInput

pytestmark = pytest.mark.usefixtures("no_network")
PROSE = [f"On day {i} somebody walked to the river and said nothing." for i in range(200)]  # 12 tokens each
PASSAGES = [" ".join(PROSE[i : i + 25]) for i in range(0, 100, 25)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "ruler_essays": [{"text": "\n".join(PROSE[:100])}, {"text": "\n".join(PROSE[100:])}],
    "ruler_qa_squad": [
        {"context": passage, "question": "Who?", "answers": {"text": ["somebody", "he"]}, "title": "River"}
        for passage in PASSAGES
    ],
    "ruler_qa_hotpot": [
        {"context": {"title": ["A", "B"], "sentences": [[a], [b]]}, "question": "Who?", "answer": "somebody"}
        for a, b in (PASSAGES[:2], PASSAGES[2:])
    ],
}


def test_what_lm_eval_would_fetch_is_noticed(no_network: list[object]) -> None:
    importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
    assert "raw.githubusercontent.com" in str(no_network)
    no_network.clear()
    forget()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word and each run of punctuation, of as many kinds as the tiny models have."""
    kinds = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 101)}
    tokenizer = Tokenizer(models.WordLevel(kinds, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<unk>", eos_token="</s>")


def forget() -> None:
    """Makes the next import of lm-eval's modules act like the first one, which would download nltk's data."""
    for module in [module for module in sys.modules if module.startswith("lm_eval.tasks.ruler")]:
        del sys.modules[module]


@pytest.fixture(scope="module", autouse=True)
def few_words() -> Iterator[None]:
    """When it is imported, lm-eval combines every adjective with every noun: six million pairs. Here there are few
    words."""

    words = wonderwords.RandomWord()
    words._categories = {name: found[:60] for name, found in words._categories.items()}
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", lambda: words)
        patch.setattr("nltk.data.path", [])
        yield
    forget()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_base("llama", tmp_path_factory.mktemp("base"), tokenizer=False, max_position_embeddings=2048)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return load_model(base, torch.device("cpu"), "float32")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path, **ROWS)
    return tmp_path


def write(folder: Path, **files: list[Any]) -> None:
    for stem, rows in files.items():
        (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def suite(*names: str, metrics: Any = (1024,), **fields: Any) -> Suite:
    tasks = [{"name": name, "metrics": list(metrics), "limit": 2} | fields for name in names]
    return Suite.model_validate({"name": "test", "description": "a test", "tasks": tasks})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The requests of generation, which are answered by their `answer`: none of them asks the model."""
    requests: list[Any] = []

    def generated(self: Any, asked: list[Any]) -> list[str]:
        requests.extend(asked)
        return [Said.answer(request.doc["outputs"]) for request in asked]

    monkeypatch.setattr(harness._Harness, "generate_until", generated)
    yield requests
    Said.answer = right


def right(outputs: list[str]) -> str:
    return f"They are {', '.join(outputs).upper()}."


class Said:
    answer = staticmethod(right)


def measure(model: Any, data: Path | None, *names: str, tokenizer: Any = None, **fields: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"data_dir": data, "precision": "float32"}
    return evaluate_model(model, tokenizer or word_tokenizer(), suite(*names, **fields), **options)


@pytest.mark.parametrize("name", ruler.MAKERS)
def test_a_task_scores_the_share_of_answers_that_are_given(model: Any, data: Path, asked: list[Any], name: str) -> None:
    suites.check_data(suite(name), data, None)
    answers = {right: 1.0, lambda _: "nothing": 0.0}
    if name in ("niah_multivalue", "niah_multiquery", "ruler_cwe"):
        answers |= {lambda outputs: right(outputs[: len(outputs) // 2]): 0.5}
    for answer, value in answers.items():
        Said.answer = answer
        (found,) = measure(model, data, name).items()
        assert found == (f"{name}/1024", {"value": value, "stderr": 0.0, "n": 2})
    # of the same texts for every model
    prompts = [request.args[0] for request in asked]
    assert prompts == prompts[:2] * len(answers)
    assert prompts[0] != prompts[1]
    for request in asked[:2]:
        prompt, options = request.args
        tokens = len(word_tokenizer()(prompt)["input_ids"])
        # a prefix of the answer comes to what lm-eval counts
        assert 300 < tokens <= 1024 - options["max_gen_toks"] + 30, tokens
        if name.startswith("niah"):
            assert all(answer in prompt for answer in request.doc["outputs"])
        if name.startswith("ruler_qa"):  # each question has its own passage beside it
            passage = ROWS[name][request.doc["index"]]["context"]
            assert (passage if isinstance(passage, str) else passage["sentences"][0][0]) in prompt


def test_the_models_own_tokenizer_says_how_long_a_text_is(model: Any, asked: list[Any]) -> None:
    for tokenizer in (word_tokenizer(), tiny_tokenizer()):  # the second has a token for each character
        measure(model, None, "niah_single_1", tokenizer=tokenizer)
        prompt = asked[-1].args[0]
        assert 800 < len(tokenizer(prompt)["input_ids"]) + 128 <= 1060
    words, characters = (len(request.args[0]) for request in asked[1::2])
    assert words > 3 * characters


def test_a_limit_holds_for_each_length(model: Any, data: Path, asked: list[Any]) -> None:
    found = measure(model, data, "ruler_vt", "ruler_qa_squad", metrics=(1024, "1100"))
    assert list(found) == [f"{name}/{n}" for name in ("ruler_vt", "ruler_qa_squad") for n in (1024, 1100)]
    assert {measured["n"] for measured in found.values()} == {2}
    assert [request.doc["max_length"] for request in asked] == [1024, 1024, 1100, 1100] * 2


def test_the_group_is_the_mean_of_its_tasks(model: Any, data: Path, asked: list[Any]) -> None:
    Said.answer = lambda outputs: "somebody, he"
    found = measure(model, data, "ruler", "niah_single_1", limit=1)
    assert set(found) == {"ruler/1024", "niah_single_1/1024"}
    assert found["ruler/1024"]["value"] == pytest.approx(2 / 13)
    assert found["ruler/1024"]["n"] == 13


def test_questions_may_be_written_as_published_or_plainly(model: Any, data: Path, asked: list[Any]) -> None:
    before = measure(model, data, "ruler_qa_squad", "ruler_qa_hotpot")
    prompts = [request.args for request in asked]
    plain = [row | {"answers": row["answers"]["text"]} for row in ROWS["ruler_qa_squad"]]
    none = plain[0] | {"question": "What can nobody answer?", "answers": []}
    pairs = [
        row | {"context": list(zip(row["context"]["title"], row["context"]["sentences"]))}
        for row in ROWS["ruler_qa_hotpot"]
    ]
    write(data, ruler_qa_squad=[none, *plain], ruler_qa_hotpot=pairs)
    asked.clear()
    assert measure(model, data, "ruler_qa_squad", "ruler_qa_hotpot") == before
    assert [request.args for request in asked] == prompts


def test_a_rehearsal_writes_texts_and_asks_no_model(data: Path) -> None:
    options: dict[str, Any] = {"data_dir": data, "limit": None, "positions": 2048, "report": lambda *_: None}
    rehearse_tasks(suite(*ruler.MAKERS).tasks, word_tokenizer(), **options)
    with pytest.raises(BadInput, match="its 2400 tokens are too few for texts of 4096"):
        rehearse_tasks(suite("niah_single_2", metrics=[4096]).tasks, word_tokenizer(), **options)


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        (
            "niah_single_2",
            None,
            r"has no ruler_essays.jsonl .*which task niah_single_2 reads; each row has a `text` of",
        ),
        ("ruler", None, r"has no ruler_essays.jsonl .*which task ruler reads"),
        ("ruler_qa_squad", None, r"has no ruler_qa_squad.jsonl .*; each row has a `context`, a `question` and a list"),
        ("niah_multivalue", [{"essay": "x"}], "ruler_essays.jsonl line 1: should have a `text` of prose"),
        ("ruler_qa_squad", [{"context": "x", "question": "y", "answers": "z"}], "line 1: should have a `context`, a"),
        ("ruler_qa_squad", [{"context": "x", "question": "y", "answers": []}], "has no question with an answer"),
        ("ruler_qa_hotpot", [{"context": "x", "question": "y", "answer": "z"}], "line 1: should have a `context` of t"),
        ("ruler_qa_hotpot", [{"context": ["x"], "question": "y", "answer": "z"}], "line 1: should have a `context` of"),
    ],
)
def test_a_file_that_is_missing_or_of_another_form_is_named(
    tmp_path: Path, name: str, rows: list[Any] | None, says: str
) -> None:
    if rows is not None:
        write(tmp_path, **{ruler.FILES[name][0]: rows})
    with pytest.raises(BadInput, match=says):
        suites.check_data(suite(name), tmp_path, None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("niah_single_3", "task niah_single_3: reads ruler_essays.jsonl; give its folder with --data"),
        ("ruler", r"task ruler: reads ruler_essays.jsonl and ruler_qa_squad.jsonl and ruler_qa_hotpot.jsonl; give"),
    ],
)
def test_without_a_folder_the_file_is_named(model: Any, name: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        measure(model, None, name)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"ruler_essays": [{"text": PROSE[0]}]}, "ruler_essays.jsonl: its 12 tokens are too few for texts of 1024"),
        ({"ruler_qa_squad": ROWS["ruler_qa_squad"][:1]}, "ruler_qa_squad.jsonl: its 300 tokens are too few"),
    ],
)
def test_texts_are_never_shorter_than_the_report_says(model: Any, data: Path, rows: dict[str, Any], says: str) -> None:
    write(data, **rows)
    with pytest.raises(BadInput, match=says):
        measure(model, data, "niah_single_2" if "ruler_essays" in rows else "ruler_qa_squad")


@pytest.mark.parametrize("name", ["ruler_vt", "ruler_cwe"])
def test_a_tokenizer_with_which_nothing_fits_is_told_and_ends(model: Any, name: str) -> None:
    """This tokenizer has one token per character. With it, lm-eval would search for a fitting ruler_vt text forever."""
    says = f"task {name}: no texts of 1024 tokens can be made for this tokenizer"
    with pytest.raises(BadInput, match=says):
        measure(model, None, name, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"metrics": ["acc"]}, "those of ruler_vt are the lengths of its texts in tokens, from 1024"),
        ({"metrics": [512]}, "those of ruler_vt are the lengths"),
        ({"shots": 1}, "ruler_vt has none"),
    ],
)
def test_lengths_and_shots_that_there_are_not_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        suite("ruler_vt", **fields)


def test_texts_that_the_base_cannot_read_are_left_out(data: Path) -> None:
    options: dict[str, Any] = {"tokenizer": word_tokenizer(), "has_other": False, "has_base": False}
    shipped = suites.load("ruler")
    assert {task.name for task in shipped.tasks} == set(ruler.MAKERS)
    found, notes = narrow(shipped, context=4096, data_dir=data, **options)
    assert {(task.name, *task.metrics) for task in found.tasks} == {(name, "4096") for name in ruler.MAKERS}
    assert notes[0].startswith("niah_single_1/8192, ")
    assert narrow(found, context=4096, data_dir=data, **options) == (found, [])
    # without a folder, what needs none
    found, _ = narrow(shipped, context=2**20, data_dir=None, **options)
    assert {task.name for task in found.tasks} == {name for name, files in ruler.FILES.items() if not files}
    assert narrow(shipped, context=2048, data_dir=data, **options)[0].tasks == []


def test_the_command_measures_a_model_with_no_network(
    base: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "{name: niah_multikey_1, metrics: [1024, 1200], limit: 2}"
    (data / "mine.yaml").write_text(f"{{description: mine, tasks: [{task}]}}")
    words = ["eval", str(base), "--suite", str(data / "mine.yaml"), "--data", str(data), "--device", "cpu", "--json"]
    assert main.main(words) == 0
    measured = json.loads(capsys.readouterr().out)["models"]["model"]
    assert {metric: (found["value"], found["n"]) for metric, found in measured.items()} == {
        "niah_multikey_1/1024": (0.0, 2),
        "niah_multikey_1/1200": (0.0, 2),
    }
    assert [(curve.title, list(curve.metrics)) for curve in curves.find(list(measured))] == [
        ("RULER, niah_multikey_1", [1024, 1200])
    ]
