"""Which rows lm-eval's tasks read: local files in place of the hub's data sets, or a folder of somebody's own tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
import lm_eval
import pyarrow
import yaml
from lm_eval.tasks import TaskManager

from liger_convert.data.row_files import file_rows
from liger_convert.eval import ruler
from liger_convert.eval.suites import ANSWER_TOKENS, LOCAL_FILES, NEEDLES, Task, local_files
from liger_convert.io.inputs import require_file
from liger_convert.utils.errors import BadInput, first_line

STOCK = Path(lm_eval.__file__).parent / "tasks"
# Where the YAMLs of the known tasks lie: reading these few folders takes no time, reading all of STOCK 8 seconds.
STOCK_YAML = {
    "piqa": "piqa/piqa.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "mmlu": "mmlu/default/_mmlu.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "wikitext": "wikitext/wikitext.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "sciq": "sciq/sciq.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "ifeval": "ifeval/ifeval.yaml",
    "drop": "drop/default.yaml",
    "swde": "swde/swde.yaml",
    "fda": "fda/fda.yaml",
}
# Tasks whose answer should stand in a short greedy continuation: prompt, and where the continuation ends. lm-eval has
# swde and fda as well, in classes that read only the hub; prompt and score are the same.
ASKED = "{{context.strip()}}\nQuestion: {{question.strip()}}\nAnswer:"
CONTAINS = {
    "squad_ctx": (ASKED, "\n"),
    "drop_ctx": (ASKED, "\n"),
    "swde": ("{{text.strip()}}", "\n"),
    "fda": ("{{text.strip()}}", "\n"),
    **dict.fromkeys(NEEDLES, ("{{input}}", "\n\n")),
}
# what lm-eval scores with data of nltk's, of the instructions of ifeval
SCORED_BY_NLTK = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
WHERE = "_where"  # the column that says which file and line a row is from
first_rows: ContextVar[int | None] = ContextVar("how many rows of a test split are read, where not all", default=None)


def task_managers(tasks: Sequence[Task], data_dir: Path | None, folder: Path) -> dict[str | None, TaskManager]:
    """lm-eval's index of the tasks, by their `include_path`; for those without one, with `data_dir`, of YAMLs that this
    writes into `folder`. Raises BadInput."""
    managers: dict[str | None, TaskManager] = {}
    for path in {task.include_path for task in tasks}:
        there = [task for task in tasks if task.include_path == path]
        managers[path] = _manager(there, data_dir, folder) if path is None else _included(Path(path))
    return managers


def included_tasks(include_path: Path) -> frozenset[str]:
    """The names of the tasks and groups whose YAML is in that folder. Raises BadInput when it is no folder."""
    return frozenset(_included(include_path).task_index)


def _included(include_path: Path) -> TaskManager:
    if not include_path.is_dir():
        raise BadInput(f"{include_path}: is not a folder; name one with the YAML files of lm-eval tasks")
    return TaskManager(include_path=include_path, include_defaults=False)


def _manager(tasks: Sequence[Task], data_dir: Path | None, folder: Path) -> TaskManager:
    for task in tasks:
        if data_dir is None and ((task.name in CONTAINS and task.name not in STOCK_YAML) or ruler.FILES.get(task.name)):
            which = " and ".join(f"{stem}.jsonl" for stem in LOCAL_FILES[task.name].values())
            raise BadInput(f"task {task.name}: reads {which}; give its folder with --data")
        files = {} if data_dir is None else local_files(task, data_dir)
        if task.of_ruler:
            ruler.write_task(task.name, task.id, task.metrics[0], files, STOCK, folder)
        elif data_dir is not None:
            _write_local_task(task.name, files, folder)
    if data_dir is not None:
        return TaskManager(include_path=folder, include_defaults=False)
    others = {task.name for task in tasks if not task.of_ruler}
    if others <= STOCK_YAML.keys():
        paths = {(STOCK / STOCK_YAML[name]).parent for name in others}
        return TaskManager(include_path=[folder, *sorted(paths)], include_defaults=False)
    return TaskManager(include_path=folder)


def _write_local_task(name: str, files: dict[str, Path], folder: Path) -> None:
    """The YAML of a task with its rows taken from `files` and all else as in lm-eval; of mmlu one for each subject."""
    if name == "mmlu":
        for stock in (STOCK / STOCK_YAML[name]).parent.glob("*.yaml"):
            subject = yaml.safe_load(stock.read_text()).get("dataset_name")
            _write_yaml(folder / stock.name, {"include": str(stock)}, files if subject else None, subject)
    elif name in CONTAINS:
        prompt, end = CONTAINS[name]
        config = {
            "task": name,
            "output_type": "generate_until",
            "doc_to_text": prompt,
            "doc_to_target": " {{value}}" if name in STOCK_YAML else " {{answers[0]}}",
            "generation_kwargs": {"until": [end], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
            "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1.0},
        }
        _write_yaml(folder / f"{name}.yaml", config, files, functions={"process_results": "contains"})
    else:
        _write_yaml(folder / f"{name}.yaml", {"include": str(STOCK / STOCK_YAML[name])}, files)


def _write_yaml(
    path: Path,
    config: dict[str, Any],
    files: dict[str, Path] | None,
    subject: str | None = None,
    functions: Mapping[str, str] = MappingProxyType({}),
) -> None:
    if files is not None:
        splits = {"training_split": None, "validation_split": None, "test_split": "test"}
        given = {"files": {split: str(file) for split, file in files.items()}, "subject": subject}
        config = config | splits | {"fewshot_split": "fewshot" if "fewshot" in files else None, "dataset_kwargs": given}
        functions = {**functions, "custom_dataset": "local_splits"}
    lines = [f"{key}: !function {__name__}.{function}\n" for key, function in functions.items()]
    path.write_text(yaml.safe_dump(config, sort_keys=False) + "".join(lines))


def local_splits(files: dict[str, str], subject: str | None, **_: Any) -> dict[str, datasets.Dataset]:
    """What a task gets for its data set: the rows of local files, by split; with `subject` those of that one."""
    splits = {}
    for split, file in files.items():
        rows = local_rows(Path(file), require_file(file).st_mtime_ns)
        if split == "test":
            rows = rows[: first_rows.get()]
        if subject is not None:
            rows = [row for row in rows if row.get("subject") == subject]
            if not rows:
                raise BadInput(f"{file}: has no rows with subject {subject!r}")
        try:
            splits[split] = datasets.Dataset.from_list(rows)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
            raise BadInput(f"{file}: a field has different types in different rows ({first_line(error)})") from None
    return splits


@lru_cache(maxsize=8)  # the tasks of mmlu share two files, and every model reads them anew
def local_rows(path: Path, _modified: int) -> list[dict[str, Any]]:
    """The rows of a task's local file, each with its place under WHERE. Raises BadInput for rows of unlike fields."""
    rows: list[dict[str, Any]] = []
    for row in file_rows(path):
        if not isinstance(row.value, dict):
            raise BadInput(f"{row.where}: is a JSON {type(row.value).__name__}; a row is an object with named fields")
        if rows and {*row.value, WHERE} != rows[0].keys():
            first = ", ".join(name for name in rows[0] if name != WHERE)
            raise BadInput(f"{row.where}: has the fields {', '.join(row.value)}; row 1 has {first}")
        rows.append(row.value | {WHERE: row.where})
    return rows


def answers_problem(doc: dict[str, Any]) -> str | None:
    """What is wrong with the answers of a row of one of CONTAINS."""
    if "answers" not in doc:
        return None if isinstance(doc["value"], str) and doc["value"].strip() else "`value` should be a text"
    answers = doc["answers"]
    if isinstance(answers, list) and answers and all(isinstance(answer, str) for answer in answers):
        return None
    return "`answers` should be a list of texts"


def instructions_problem(doc: dict[str, Any]) -> str | None:
    """Why an instruction of a row of ifeval cannot be scored."""
    import nltk

    asked = sorted(SCORED_BY_NLTK.intersection(doc["instruction_id_list"]))
    if not asked:
        return None
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        what = f"{asked[0]} is scored with nltk's data punkt_tab, which is not installed"
        return f"{what}; run `python -m nltk.downloader punkt_tab`, or set NLTK_DATA to the folder above it"
    return None


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether an answer stands in the continuation, in any case: how the recall tasks of Based are scored."""
    said = results[0].lower()
    answers = doc["answers"] if "answers" in doc else [doc["value"].strip()]
    return {"contains": float(any(answer.strip() and answer.lower() in said for answer in answers))}


# what says whether a row of a task can be scored, beside lm-eval
OWN_PROBLEMS = {"ifeval": instructions_problem} | dict.fromkeys(CONTAINS, answers_problem)
