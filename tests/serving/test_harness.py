"""lm-eval's `local-completions` gets the model's scores from a server that vLLM's own command has started."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from reminding import REMINDERS, random_rows, reminders_due, trained_export
from running import NAME, VLLM, Running, running_server
from served import Reference
from tiny import tiny_tokenizer

LENGTH, ROWS = 120, 6
PARTS = ("--max-num-batched-tokens", "48", "--max-num-seqs", "4")  # so that a prompt is read in parts, through its page
TASK = """
task: reminders
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


class Question(NamedTuple):
    """A row up to where a reminder is due that only the memory knows, and the place of the right one in REMINDERS."""

    tokens: list[int]
    answer: int


def questions() -> list[Question]:
    rows = random_rows(ROWS, LENGTH, seed=-1)
    return [Question(row[: (at := reminders_due(row)[-1])], row[at] - REMINDERS.start) for row in rows]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(trained_export("hybrid", "gla"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    export = trained_export("hybrid", "gla")
    with running_server(export, tmp_path_factory.mktemp("server"), *PARTS, command=VLLM, breakable=True) as found:
        yield found


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of lm-eval. Each question has ten answers of one token."""
    folder, decode = tmp_path_factory.mktemp("task"), tiny_tokenizer().decode
    choices = [decode([token]) for token in REMINDERS]
    lines = [{"text": decode(asked.tokens), "choices": choices, "answer": asked.answer} for asked in questions()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reminders.yaml").write_text(TASK.format(rows=folder / "rows.jsonl", cache=folder / "cache"))
    return folder


def evaluate(server: Running, task: Path) -> tuple[torch.Tensor, float]:
    """The log-probability of every answer to every question, and the accuracy that lm-eval reports."""
    asking: dict[str, Any] = {
        "model": NAME, "base_url": f"{server.url}/v1/completions", "tokenizer": str(trained_export("hybrid", "gla")),
        "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1, "max_length": 256,
    }  # fmt: skip
    found = lm_eval.simple_evaluate(
        "local-completions",
        model_args=asking,
        tasks=["reminders"],
        task_manager=TaskManager(include_path=str(task)),
        batch_size=5,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["reminders"], key=lambda sample: sample["doc_id"])
    scores = torch.tensor([[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples])
    return scores, found["results"]["reminders"]["acc,none"]


def assert_scored(reference: Reference, asked: list[Question], scores: torch.Tensor) -> None:
    """An answer of one token has the tolerance of one log-probability."""
    for question, found in zip(asked, scores, strict=True):
        wanted = reference.score(question.tokens, [REMINDERS.start])[0, list(REMINDERS)]
        assert (found - wanted).abs().max() <= reference.tolerance(question.tokens)


def test_scores_equal_those_of_the_model(server: Running, task: Path, reference: Reference) -> None:
    scores, accuracy = evaluate(server, task)
    asked = questions()
    assert_scored(reference, asked, scores)
    best = scores.argmax(1).tolist()
    assert accuracy == sum(a == b.answer for a, b in zip(best, asked)) / ROWS
    with pytest.raises(AssertionError):
        assert_scored(reference, asked[1:] + asked[:1], scores)


def test_scores_of_a_server_that_loses_its_states_differ(server: Running, task: Path, reference: Reference) -> None:
    tell(server, "lose_from_pages", "states", 0)
    lost, _ = evaluate(server, task)
    tell(server, "mend_faults")
    with pytest.raises(AssertionError):
        assert_scored(reference, questions(), lost)
    mended, _ = evaluate(server, task)
    assert_scored(reference, questions(), mended)


def tell(server: Running, method: str, *args: Any) -> None:
    """Calls a method of `parallel.Breakable` in the server's worker."""
    body = json.dumps({"method": method, "args": args}).encode()
    asked = urllib.request.Request(f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.status == 200
