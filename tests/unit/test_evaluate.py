"""Suites, and lm-eval's tasks on local rows."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tasks import ROWS, log_likelihood, run, suite, write_rows
from tiny import save_tiny_base, tiny_tokenizer

from liger_convert.config import resources
from liger_convert.data.documents import Document
from liger_convert.eval import suites
from liger_convert.eval.evaluation import evaluate_model
from liger_convert.eval.generation import load_model
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base
from liger_convert.utils.errors import BadInput

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return load_model(base, CPU, "float32")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows")


@pytest.mark.parametrize("name", resources.names("suites"))
def test_every_shipped_suite_is_valid_and_knows_its_local_files(name: str) -> None:
    loaded = suites.load(name)
    assert loaded.name == name
    assert {task.name for task in loaded.tasks} <= set(suites.LOCAL_FILES)


def test_the_honest_suites_name_their_metrics() -> None:
    honest = suites.load("honest")
    assert [metric for measure in honest.of_text for metric in measure.metrics][:4] == [
        "text_ppl",
        "text_byte_ppl",
        "other_ppl",
        "other_byte_ppl",
    ]
    ends = [256 << i for i in range(8)]  # up to 32,768
    assert [measure.metrics for measure in honest.positions] == [
        [f"{name}_nll_at_{end}" for end in ends] for name in ("text", "other")
    ]
    assert honest.copying[0].metrics == [f"copy_nll_{length}" for length in (64, 128, 256, 512, 1000, 2048)]
    assert {task.name for task in honest.tasks} >= {*suites.NEEDLES, "squad_ctx", "drop_ctx", "winogrande"}
    assert (honest.text_tokens(), honest.text_tokens("other")) == (2 * 2048, 2 * 1024)
    assert suites.load("honest-quick").tasks == []


def test_the_paper_suite_has_the_papers_tasks_and_shots() -> None:
    tasks = {task.name: task.shots or 0 for task in suites.load("paper").tasks}
    assert tasks == {"piqa": 0, "arc_easy": 0, "arc_challenge": 0, "hellaswag": 0, "winogrande": 0, "mmlu": 5}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- quick", "a suite is a mapping"),
        ("description: x", "it measures nothing"),
        (
            "{description: x, tasks: [{name: piqa, metric: [acc]}]}",
            "tasks[0].metric: unknown key; did you mean 'metrics'",
        ),
        ("{description: x, text: [{window: 16, score_from: 16}]}", "text[0].score_from: should be below the window"),
        ("{description: x, copying: [{length: 8}, {length: 8}]}", "copy_nll_8 would be measured 2 times"),
        ("{description: x, copying: [{length: 8}, {lengths: [4, 8]}]}", "copy_nll_8 would be measured 2 times"),
        ("{description: x, copying: [{length: 8, lengths: [4]}]}", "copying[0].length: lengths already names"),
        ("{description: x, positions: [{window: 255}]}", "positions[0].window: should be from 256"),
        ("{description: x, text: [{source: other, name: far}]}", "text[0].name: a measure of `source: other`"),
        ("{description: x, text: [{name: other_far}]}", "text[0].name: a measure of `source: other`"),
        ("{description: x, text: [{windows: 1}]}", "text[0].windows: should be from 2"),
        ("{description: x, positions: [{windows: 1}]}", "positions[0].windows: should be from 2"),
        ("{description: x, copying: [{draws: 1}]}", "copying[0].draws: should be from 2"),
        ("{description: x, agreement: {prompts: 1}}", "agreement.prompts: should be from 2"),
        ("{description: x, text: [{source: train}]}", "text[0].source: 'train' is not a choice"),
    ],
)
def test_a_suite_with_a_mistake_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BadInput) as caught:
        suites.load(str(tmp_path / "mine.yaml"))
    assert says in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_multiple_choice_picks_the_likelier_answer_to_lm_evals_prompt(model: Any, rows: Path) -> None:
    found = run(model, rows, [{"name": "piqa", "metrics": ["acc", "acc_norm"]}])
    right = []
    for row in ROWS["piqa"]:
        prompt = f"Question: {row['goal']}\nAnswer:"
        scores = [log_likelihood(model, prompt, f" {row[key]}") for key in ("sol1", "sol2")]
        right.append(int(np.argmax(scores)) == row["label"])
    assert set(found) == {"piqa/acc", "piqa/acc_norm"}
    assert found["piqa/acc"]["value"] == pytest.approx(np.mean(right))
    assert found["piqa/acc"]["stderr"] == pytest.approx(np.std(right, ddof=1) / len(right) ** 0.5)
    assert found["piqa/acc"]["n"] == len(right)


def test_a_likelihood_task_gives_the_probability_of_the_last_word(model: Any, rows: Path) -> None:
    found = run(model, rows, [{"name": "lambada_openai", "metrics": ["acc", "perplexity"]}])
    scores = [log_likelihood(model, row["text"].rpartition(" ")[0], " cat") for row in ROWS["lambada_openai"]]
    assert found["lambada_openai/perplexity"]["value"] == pytest.approx(np.exp(-np.mean(scores)), rel=1e-4)
    assert found["lambada_openai/perplexity"]["stderr"] > 0
    assert found["lambada_openai/acc"] == {"value": 0, "stderr": 0, "n": 4}


def test_a_metric_without_a_standard_error_has_null(model: Any, rows: Path) -> None:
    found = run(model, rows, [{"name": "wikitext", "metrics": ["word_perplexity"]}])
    assert found["wikitext/word_perplexity"]["stderr"] is None
    assert found["wikitext/word_perplexity"]["n"] == 2


def test_a_generation_task_finds_the_answer_in_the_greedy_continuation(model: Any, rows: Path) -> None:
    prompt = tiny_tokenizer()("Bob is 0 years old.\nQuestion: How old is Bob?\nAnswer:", return_tensors="pt").to(CPU)
    ids = model.generate(**prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)[
        0, prompt["input_ids"].shape[1] :
    ]
    said = tiny_tokenizer().decode(ids, skip_special_tokens=True).partition("\n")[0]
    answers = [[said[1:4]], ["not said"], [said[1:4].upper(), "nor this"], ["  "]]
    made = [ROWS["squad_1k"][0] | {"answers": answer + [""] * (2 - len(answer))} for answer in answers]
    (rows / "squad_1k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    found = run(model, rows, [{"name": "squad_ctx", "metrics": ["contains"]}], batch_size=1)
    assert found["squad_ctx/contains"]["value"] == 0.5
    assert found["squad_ctx/contains"]["n"] == 4


@pytest.mark.parametrize(
    ("task", "requests"),
    # a page of wikitext takes three windows of 16 tokens
    [("wikitext/word_perplexity", 6), ("piqa/acc", 12), ("squad_ctx/contains", 5)],
    ids=["rolling", "likelihood", "generation"],
)
def test_progress_ends_at_its_total_and_never_passes_it(base: Path, rows: Path, task: str, requests: int) -> None:
    model = load_model(base, CPU, "float32")
    model.config.max_position_embeddings = 16 if "wikitext" in task else 512
    told: list[tuple[float, float | None]] = []
    name, metric = task.split("/")
    report = lambda done, total, note="": told.append((done, total))  # noqa: E731
    run(model, rows, [{"name": name, "metrics": [metric]}], report=report)
    assert told[-1] == (requests, requests)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {requests}


def test_progress_is_that_of_all_parts_of_a_suite(model: Any, rows: Path) -> None:
    told: list[float] = []
    report = lambda done, total, note="": told.append(done / total)  # noqa: E731
    metrics = {"piqa": "acc", "squad_ctx": "contains"}
    run(model, rows, [{"name": name, "metrics": [metric]} for name, metric in metrics.items()], report=report)
    assert told == sorted(told)
    assert 0 < told[0] < 0.5 < told[-1] == 1


def test_shots_of_a_group_are_drawn_from_their_own_file(
    model: Any, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_convert.eval import harness, task_files

    stock = (task_files.STOCK / task_files.STOCK_YAML["mmlu"]).parent
    subjects = [
        name for path in stock.glob("mmlu_*.yaml") if (name := yaml.safe_load(path.read_text())["dataset_name"])
    ]
    row = {"choices": ["1", "2", "3", "4"], "answer": 1}
    test = [row | {"question": "What comes next?", "subject": subject} for subject in subjects]
    dev = [row | {"question": f"{i} + 1 in {subject}?", "subject": subject} for subject in subjects for i in range(3)]
    for name, values in {"mmlu": test, "mmlu_dev": dev}.items():
        (rows / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    asked: dict[str, str] = {}

    def answer(self: Any, requests: list) -> list:
        asked.update({request.task_name: request.args[0] for request in requests})
        return [(float(request.idx == 1), False) for request in requests]

    monkeypatch.setattr(harness._Harness, "loglikelihood", answer)
    found = run(model, rows, [{"name": "mmlu", "shots": 2, "metrics": ["acc"]}])
    assert found["mmlu/acc"]["value"] == 1
    assert found["mmlu/acc"]["n"] == len(asked) == len(subjects)
    prompt = asked["mmlu_anatomy"]
    assert prompt.count("Answer:") == 3
    assert prompt.index("0 + 1 in anatomy?") < prompt.index("1 + 1 in anatomy?") < prompt.index("What comes next?")


@pytest.mark.parametrize("linear", [False, True])
def test_continuations_get_the_log_probabilities_that_lm_eval_gives_them(base: Path, model: Any, linear: bool) -> None:
    from lm_eval.models.huggingface import HFLM

    from liger_convert.eval.harness import _Harness

    if linear:
        plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 6, "sinks": 2})}, "layers": ["main"] * 3}
        model = linearize_base(base, plan).eval()
    harness = _Harness(model, tiny_tokenizer(), 3, torch.float32, lambda *_: None)
    random = np.random.default_rng(0)
    sizes = [(5, 3), (1, 1), (40, 7), (300, 4), (12, 2), (12, 1)]  # one of them longer than the model's 256
    pairs = [tuple(random.integers(3, 101, size).tolist() for size in both) for both in sizes]
    context, continuation = pairs[0]
    pairs += [(context, [*continuation[:-1], 7])]  # the same input
    with torch.no_grad():
        greedy = model(torch.tensor([context])).logits[0, -1].argmax().item()
    requests = [(("", ""), *pair) for pair in (*pairs, (context, [greedy]))]
    expected = HFLM._loglikelihood_tokens(harness, requests, disable_tqdm=True)
    found = harness._loglikelihood_tokens(requests)
    assert [answer for _, answer in found] == [answer for _, answer in expected]
    assert found[-1][1]
    assert not all(answer for _, answer in found)
    np.testing.assert_allclose([p for p, _ in found], [p for p, _ in expected], rtol=1e-5, atol=1e-5)


def test_local_rows_may_be_compressed_and_limited(model: Any, rows: Path) -> None:
    plain = run(model, rows, [{"name": "piqa", "metrics": ["acc"], "limit": 3}])
    (rows / "piqa.jsonl.xz").write_bytes(lzma.compress((rows / "piqa.jsonl").read_bytes()))
    (rows / "piqa.jsonl").unlink()
    assert run(model, rows, [{"name": "piqa", "metrics": ["acc"], "limit": 3}]) == plain
    assert plain["piqa/acc"]["n"] == 3
    assert run(model, rows, [{"name": "piqa", "metrics": ["acc"], "limit": 3}], limit=2)["piqa/acc"]["n"] == 2


def test_tasks_that_need_data_are_left_out_without_it(model: Any, rows: Path) -> None:
    ids = np.arange(3, 83, dtype=np.int32)
    both = suite(copying=[{"length": 8, "draws": 2}], tasks=[{"name": "piqa", "metrics": ["acc"], "needs_data": True}])
    held_out = [Document(ids, np.ones(80, bool), 80)]
    options = {"held_out": held_out, "precision": "float32"}
    assert set(evaluate_model(model, tiny_tokenizer(), both, **options)) == {"copy_nll_8"}
    assert set(evaluate_model(model, tiny_tokenizer(), both, data_dir=rows, **options)) == {"copy_nll_8", "piqa/acc"}


@pytest.mark.parametrize("kind", ["gla", "liger-paper"])
def test_a_linearized_model_scores_the_same_alone_and_in_a_padded_batch(base: Path, rows: Path, kind: str) -> None:
    spec = resolve_spec({"type": kind, "window": 6, **({"sinks": 2} if kind == "gla" else {})})
    plan = {"format": 2, "mixers": {"main": spec}, "layers": ["main", "softmax", "main"]}
    model = linearize_base(base, plan).eval()
    made = [ROWS["squad_1k"][0] | {"context": "x" * 7 * i, "answers": ["e"]} for i in range(4)]
    (rows / "squad_1k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    tasks = [
        {"name": "piqa", "metrics": ["acc", "acc_norm"]},
        {"name": "lambada_openai", "metrics": ["perplexity"]},
        {"name": "squad_ctx", "metrics": ["contains"]},
    ]
    alone, batched = (run(model, rows, tasks, batch_size=size) for size in (1, 4))
    for metric, measured in alone.items():
        assert batched[metric] == pytest.approx(measured, rel=1e-4), metric


@pytest.mark.parametrize(
    ("change", "task", "says"),
    [
        (
            lambda rows: (rows / "piqa.jsonl").unlink(),
            {},
            "has no piqa.jsonl (or .jsonl.xz, .jsonl.gz), which task piqa",
        ),
        (lambda rows: (rows / "piqa.jsonl").write_text('{"goal": 1}\nnope\n'), {}, "piqa.jsonl line 2: is not JSON"),
        (lambda rows: (rows / "piqa.jsonl").write_text("[1]\n"), {}, "piqa.jsonl line 1: is a JSON list"),
        (
            lambda rows: (rows / "piqa.jsonl").write_text('{"a": 1}\n{"b": 1}\n'),
            {},
            "line 2: has the fields b; row 1 has a",
        ),
        (lambda rows: (rows / "piqa.jsonl").write_text('{"a": 1}\n{"a": "b"}\n'), {}, "a field has different types"),
        (lambda rows: (rows / "piqa.jsonl").write_text('{"a": 1}\n'), {}, "line 1: does not fit task piqa"),
        (lambda rows: None, {"metrics": ["f1"]}, "task piqa: has no metric 'f1'; use one of acc, acc_norm"),
        (lambda rows: None, {"shots": 1}, "task piqa: has no local file to draw shots from"),
        (lambda rows: None, {"name": "triviaqa"}, "task triviaqa: has no local form; with --data use piqa,"),
        (lambda rows: None, {"name": "mmlu"}, "mmlu.jsonl: has no rows with subject"),
    ],
)
def test_unusable_task_data_is_one_sentence(model: Any, rows: Path, change: Any, task: dict, says: str) -> None:
    change(rows)
    with pytest.raises(BadInput) as caught:
        run(model, rows, [{"name": "piqa", "metrics": ["acc"]} | task])
    assert says in str(caught.value)


def test_a_task_of_ours_without_data_says_what_to_give(model: Any) -> None:
    with pytest.raises(BadInput, match=r"task squad_ctx: reads squad_1k.jsonl; give its folder with --data"):
        run(model, None, [{"name": "squad_ctx", "metrics": ["contains"]}])


def test_a_stock_task_without_the_hub_says_what_to_give(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(BadInput, match=r"task piqa: its data cannot be fetched from the hub \(or give --data DIR\)"):
        run(model, None, [{"name": "piqa", "metrics": ["acc"]}])


def refuse(*_: Any, **__: Any) -> None:
    raise ConnectionError("the hub is out of reach")


def test_text_measures_without_text_say_so(model: Any) -> None:
    with pytest.raises(BadInput, match="suite test: needs held-out text, but none is given"):
        evaluate_model(model, tiny_tokenizer(), suite(text=[{"window": 16}]))


@pytest.mark.parametrize(
    ("name", "says"),
    [("ai2_arc", "task ai2_arc: is a tag; name its tasks arc_challenge, arc_easy"), ("arc_esay", "knows no such task")],
)
def test_a_name_that_is_no_task_is_one_sentence(
    model: Any, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    from liger_convert.eval import task_files

    small = task_files.TaskManager(include_path=task_files.STOCK / "arc", include_defaults=False)
    monkeypatch.setattr(task_files, "TaskManager", lambda **_: small)  # all of them take 8 seconds to index
    with pytest.raises(BadInput, match=says):
        run(model, None, [{"name": name, "metrics": ["acc"]}])
