"""Data for lm-eval's tasks: local files instead of the hub's datasets, or a folder of user-defined tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
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

from liger_convert.config import yaml_file
from liger_convert.data.row_files import file_rows
from liger_convert.eval import ruler
from liger_convert.eval.suites import ANSWER_TOKENS, LOCAL_FILES, NEEDLES, Task, local_files
from liger_convert.io.inputs import read_text, require_file
from liger_convert.utils.errors import BadInput, first_line, refusing

STOCK = Path(lm_eval.__file__).parent / "tasks"
# The YAML files of the known tasks. Indexing only their folders is fast; indexing all of STOCK takes 8 seconds.
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
# Tasks scored by whether a short greedy continuation contains the answer: (prompt, stop string). lm-eval also has swde
# and fda, in classes that can only read the hub; prompt and score are the same.
ASKED = "{{context.strip()}}\nQuestion: {{question.strip()}}\nAnswer:"
CONTAINS = {
    "squad_ctx": (ASKED, "\n"),
    "drop_ctx": (ASKED, "\n"),
    "swde": ("{{text.strip()}}", "\n"),
    "fda": ("{{text.strip()}}", "\n"),
    **dict.fromkeys(NEEDLES, ("{{input}}", "\n\n")),
}
# the instructions of ifeval that lm-eval scores with nltk data
SCORED_BY_NLTK = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
TASK_BYTES = 1 << 20  # of a task's YAML file
UNREAD_FOLDERS = ("__pycache__", ".ipynb_checkpoints")  # in which lm-eval looks for no tasks
WHERE = "_where"  # the column with the file and line that a row is from
first_rows: ContextVar[int | None] = ContextVar("how many rows of a test split are read, where not all", default=None)


def task_managers(tasks: Sequence[Task], data_dir: Path | None, folder: Path) -> dict[str | None, TaskManager]:
    """lm-eval's task managers for `tasks`, by `include_path`.

    For RULER's tasks without an `include_path`, and for all such tasks with `data_dir`, this writes YAML files to
    `folder`. Raises BadInput if an `include_path` is not a folder, and for a task that can only read local files if
    `data_dir` is None.
    """
    managers: dict[str | None, TaskManager] = {}
    for path in {task.include_path for task in tasks}:
        there = [task for task in tasks if task.include_path == path]
        if path is None:
            managers[path] = _manager(there, data_dir, folder)
        else:
            managers[path] = _included(Path(path))
            _refuse_repeated_keys(managers[path], [task.name for task in there])
    return managers


def _refuse_repeated_keys(manager: TaskManager, names: Collection[str]) -> None:
    """Raises BadInput if a key appears twice in the YAML of these tasks and groups, of a group's tasks, or in what such
    files include: lm-eval would use the last one. Files of lm-eval itself are left as they are."""
    waiting: list[str | Path] = [*names]
    seen = set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, str):
            if (entry := manager.task_index.get(one)) is not None:
                waiting += [entry.yaml_path] if entry.yaml_path is not None else entry.tags
                waiting += _texts((entry.cfg or {}).get("task"))
        elif one.is_file() and STOCK not in one.resolve().parents:
            root = yaml_file.compose(read_text(one, TASK_BYTES), str(one))
            yaml_file.refuse_repeated_keys(root, str(one))
            includes = [value for key, value in _pairs(root) if key.value == "include"]
            files = [file for value in includes for file in (value.value if isinstance(value.value, list) else [value])]
            waiting += [one.parent / file.value for file in files]


def _pairs(root: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    """The keys and values of a task's YAML; none if it is not a mapping."""
    return root.value if isinstance(root, yaml.MappingNode) else []


def _texts(value: Any) -> list[str]:
    """All texts in nested lists and mappings; of a group's `task`, the names of its tasks are among them."""
    if isinstance(value, dict | list):
        return [text for part in (value.values() if isinstance(value, dict) else value) for text in _texts(part)]
    return [value] if isinstance(value, str) else []


def included_tasks(include_path: Path, wanted: Collection[str]) -> frozenset[str]:
    """The names of the tasks and groups in the YAML files of that folder. Raises BadInput if it is not a folder, and
    for files that lm-eval would leave out: those that are not YAML, and of the `wanted` tasks one that includes what it
    cannot, or has the name of another."""
    names = frozenset(map(str, _included(include_path).task_index))
    found: dict[str, Path] = {}
    for file in sorted(include_path.rglob("*.yaml")):
        root = yaml_file.compose(read_text(file, TASK_BYTES), str(file))  # lm-eval has tags of its own
        told = {key.value: value.value for key, value in _pairs(root) if isinstance(value, yaml.ScalarNode)}
        name = told.get("group", told.get("task"))
        if name not in wanted or file.parent.name in UNREAD_FOLDERS:
            continue
        if name not in names:
            raise BadInput(f"{file}: lm-eval cannot read it; does it include itself, or a file that is not there?")
        if (other := found.setdefault(name, file)) != file:
            raise BadInput(f"{file}: has the name {name}, as {other} has; name them apart")
    return names


@contextlib.contextmanager
def no_exit(task: Task) -> Iterator[None]:
    """Context that raises BadInput for a `sys.exit` in a task's own Python, which would end the command silently."""
    try:
        yield
    except SystemExit as error:
        what = f"its Python ends the program (sys.exit, {error.code!r}); let it raise an error or return a value"
        raise BadInput(f"task {task.name}: {what}") from error


def _included(include_path: Path) -> TaskManager:
    if not include_path.is_dir():
        raise BadInput(f"{include_path}: is not a folder; name one with the YAML files of lm-eval tasks")
    with refusing(f"{include_path}: lm-eval cannot list its tasks; is each name a text?"):
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
    """Writes the YAML file of a task that reads `files` and is otherwise lm-eval's; for mmlu, one for each subject."""
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
    """The dataset of a task, which lm-eval requests through `custom_dataset`: the rows of local files, by split.

    subject: only the rows of this subject. Raises BadInput if there are none, or if a field has different types in
    different rows.
    """
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


@lru_cache(maxsize=8)  # the tasks of mmlu share two files, which are needed again for every model
def local_rows(path: Path, _modified: int) -> list[dict[str, Any]]:
    """The rows of a task's local file, each with its file and line in the column WHERE. Raises BadInput for a row that
    is not an object or has other fields than the first row."""
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
    """What is wrong with the answers in a row of a task in CONTAINS; None if nothing is."""
    if "answers" not in doc:
        return None if isinstance(doc["value"], str) and doc["value"].strip() else "`value` should be a text"
    answers = doc["answers"]
    if isinstance(answers, list) and answers and all(isinstance(one, str) and one.strip() for one in answers):
        return None
    return "`answers` should be a list of texts, none of them empty: every text contains an empty one"


def instructions_problem(doc: dict[str, Any]) -> str | None:
    """Why an instruction in a row of ifeval cannot be scored; None if all can."""
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
    """1.0 if an answer occurs in the continuation, ignoring case, else 0.0. The recall tasks of Based are scored this
    way."""
    said = results[0].lower()
    answers = doc["answers"] if "answers" in doc else [doc["value"].strip()]
    return {"contains": float(any(answer.strip() and answer.lower() in said for answer in answers))}


# our own checks of whether a task's row can be scored, in addition to lm-eval's
OWN_PROBLEMS = {"ifeval": instructions_problem} | dict.fromkeys(CONTAINS, answers_problem)
