"""A few rows of lm-eval's tasks, and tiny models that answer them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_tokenizer

from liger_convert.eval.evaluation import evaluate_model
from liger_convert.eval.suites import Suite

ROWS: dict[str, list[dict[str, Any]]] = {
    "piqa": [
        {"goal": f"open box {i}", "sol1": "lift its lid", "sol2": f"sit on it {i}", "label": i % 2} for i in range(6)
    ],
    "lambada_openai": [{"text": f"he had {i} cats and fed every last cat"} for i in range(4)],
    "wikitext2_test": [{"page": f" = Page {i} = \n \n Some words , and 1 @,@ 000 more . \n"} for i in range(2)],
    "squad_1k": [
        {"context": f"Bob is {i} years old.", "question": "How old is Bob?", "answers": [str(i)]} for i in range(5)
    ],
    "mmlu": [
        {"question": f"{i} + 1?", "choices": ["1", "2", "3", "4"], "answer": i % 4, "subject": subject}
        for subject in ("anatomy", "virology")
        for i in range(3)
    ],
}
ROWS["mmlu_dev"] = ROWS["mmlu"]


def write_rows(folder: Path) -> Path:
    folder.mkdir()
    for name, values in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    return folder


def suite(**fields: Any) -> Suite:
    return Suite.model_validate({"name": "test", "description": "a test", **fields})


def run(model: Any, rows: Path | None, tasks: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    options = {"batch_size": 2, "precision": "float32"} | options
    return evaluate_model(model, tiny_tokenizer(), suite(tasks=tasks), data_dir=rows, **options)


def log_likelihood(model: Any, context: str, answer: str) -> float:
    tokenizer = tiny_tokenizer()
    prompt, ids = tokenizer(context)["input_ids"], tokenizer(context + answer)["input_ids"]
    with torch.no_grad():
        losses = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(losses[i - 1, ids[i]].item() for i in range(len(prompt), len(ids)))
