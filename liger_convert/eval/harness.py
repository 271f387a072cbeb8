"""lm-eval's tasks on a loaded model: which rows they read, how they are run, what of their results is kept."""

from __future__ import annotations

import bisect
import contextlib
import io
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
import lm_eval
import numpy as np
import pyarrow
import torch
import yaml
from lm_eval.api.model import LM, CacheHook
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from liger_convert.data.sources import file_rows
from liger_convert.eval.measures import Measurement, measurement, target_losses
from liger_convert.eval.suites import Task, local_files
from liger_convert.io.files import scratch_folder
from liger_convert.io.inputs import require_file
from liger_convert.utils.device import autocast
from liger_convert.utils.errors import BadInput, LinearizeError, first_line
from liger_convert.utils.progress import Report

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
}
# Our own tasks: the answer should stand in a short greedy continuation. Task -> prompt and where the continuation ends.
CONTAINS = {
    "squad_ctx": ("{{context.strip()}}\nQuestion: {{question.strip()}}\nAnswer:", "\n"),
    "niah_s1_1024": ("{{input}}", "\n\n"),
    "niah_s2_1024": ("{{input}}", "\n\n"),
    "niah_s1_2048": ("{{input}}", "\n\n"),
    "niah_s2_2048": ("{{input}}", "\n\n"),
}
WHERE = "_where"  # the column that says which file and line a row is from
_first_rows: ContextVar[int | None] = ContextVar("how many rows of a test split are read, where not all", default=None)
_sound: set[tuple[Any, ...]] = set()  # what `check_rows` found nothing wrong with
REHEARSED = 32  # rows of a task that show whether it runs; all rows of a large one take minutes
BOOTSTRAP = 1000  # resamples for the standard error of a metric that has no formula for it


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    data_dir: Path | None,
    limit: int | None,
    batch_size: int,
    dtype: torch.dtype,
    report: Report,
) -> Iterator[tuple[str, dict[str, Measurement]]]:
    """Of each task its name and what it measures on `model`, as {"task/metric": measurement}; n = documents.

    With `data_dir` they read the local files there (`suites.LOCAL_FILES`) and nothing else; without, their data sets
    from the hub. `limit` replaces the limits of the tasks. Raises BadInput for a task or metric that there is not, and
    for data that cannot be had or does not fit the task.
    """
    harness = _Harness(model, tokenizer, batch_size, dtype, report)
    for task, _, results in _evaluated(harness, tasks, data_dir, limit, BOOTSTRAP):
        yield task.name, _flatten(task, results)


def rehearse_tasks(
    tasks: Sequence[Task], *, data_dir: Path | None, limit: int | None, positions: int | None, report: Report
) -> None:
    """What `run_tasks` does but asking a model, whose answers are made up, on the first REHEARSED rows of each task: so
    what is wrong with a task, its data or its metrics is told before a training and not after it. Labels of the
    hub are looked at in all rows. positions: the tokens that the model will take. Raises BadInput."""
    for done, task in enumerate(tasks, 1):
        rows = limit or task.limit
        try:
            few = REHEARSED if rows is None else min(rows, REHEARSED)
            ((_, loaded, results),) = _evaluated(_Nobody(), [task], data_dir, few, 0)
        except LinearizeError:
            raise
        except Exception as error:  # whatever rows that do not fit make lm-eval raise
            why = f"its rows do not fit the task: {type(error).__name__}: {first_line(error)}"
            raise BadInput(f"task {task.name}: {why}") from error
        _flatten(task, results)
        for part in loaded["tasks"].values():
            if data_dir is None:  # `check_rows` has looked at local ones
                _check_labels(task, part, rows)
            room = (part.config.generation_kwargs or {}).get("max_gen_toks", 0)
            if positions is not None and room >= positions:
                raise BadInput(f"task {task.name}: answers take {room} tokens, and the base takes {positions} in all")
        report(done, len(tasks), task.name)


def _check_labels(task: Task, part: Any, rows: int | None) -> None:
    """Raises BadInput for a label that names no choice in data of the hub; of local rows `check_rows` does."""
    if part.OUTPUT_TYPE != "multiple_choice" or part.multiple_input:
        return
    for number, doc in enumerate(islice(part.eval_docs, rows), 1):
        if (problem := _label_problem(part.doc_to_target(doc), part.doc_to_choice(doc))) is not None:
            raise BadInput(f"task {task.name}: row {number}: {problem}")


def _evaluated(
    lm: Any, tasks: Sequence[Task], data_dir: Path | None, limit: int | None, bootstrap: int
) -> Iterator[tuple[Task, Any, dict[str, Any]]]:
    """Of each task itself, lm-eval's own, and its results on `lm`."""
    with scratch_folder() as folder:
        with _quiet():
            manager = _task_manager(tasks, data_dir, folder)
        for task in tasks:
            with _quiet():
                loaded = _load(manager, task, data_dir)
                # not simple_evaluate: that also asks git, pip and the hub about this machine, for every task anew
                results = lm_eval.evaluate(
                    lm, loaded, limit=limit or task.limit, bootstrap_iters=bootstrap, log_samples=False
                )
            yield task, loaded, results["results"][task.name]


def _task_manager(tasks: Sequence[Task], data_dir: Path | None, folder: Path) -> TaskManager:
    """lm-eval's index of the tasks; with `data_dir` of YAMLs that this writes into `folder`."""
    names = [task.name for task in tasks]
    if data_dir is not None:
        for task in tasks:
            _write_local_task(task.name, local_files(task, data_dir), folder)
        return TaskManager(include_path=folder, include_defaults=False)
    for name in names:
        if name in CONTAINS:
            raise BadInput(f"task {name}: reads a local file; give the folder that holds it with --data")
    if all(name in STOCK_YAML for name in names):
        paths: list[str | Path] = [(STOCK / STOCK_YAML[name]).parent for name in names]
        return TaskManager(include_path=sorted(set(paths)), include_defaults=False)
    return TaskManager()


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
            "doc_to_target": " {{answers[0]}}",
            "generation_kwargs": {"until": [end], "max_gen_toks": 48, "do_sample": False},
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
        rows = _rows(Path(file), require_file(file).st_mtime_ns)
        if split == "test":
            rows = rows[: _first_rows.get()]
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
def _rows(path: Path, _modified: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in file_rows(path):
        if not isinstance(row.value, dict):
            raise BadInput(f"{row.where}: is a JSON {type(row.value).__name__}; a row is an object with named fields")
        if rows and {*row.value, WHERE} != rows[0].keys():
            first = ", ".join(name for name in rows[0] if name != WHERE)
            raise BadInput(f"{row.where}: has the fields {', '.join(row.value)}; row 1 has {first}")
        rows.append(row.value | {WHERE: row.where})
    return rows


def check_rows(tasks: Sequence[Task], data_dir: Path, limit: int | None) -> None:
    """Raises BadInput, naming file and line, for a row in `data_dir` that does not fit its task, of those that will be
    asked. Needs no model, so it can stop long work before it begins; what it found sound it does not look at again
    until a file changes."""

    def state(task: Task) -> tuple[Any, ...]:
        files = local_files(task, data_dir).values()
        return task.name, task.shots, limit or task.limit, *((file, os.stat(file).st_mtime_ns) for file in files)

    if new := [task for task in tasks if state(task) not in _sound]:
        with scratch_folder() as folder, _quiet():
            manager = _task_manager(new, data_dir, folder)
            for task in new:
                for part in _load(manager, task, data_dir)["tasks"].values():
                    _check_docs(task, part, limit or task.limit)
                _sound.add(state(task))


def _check_docs(task: Task, part: Any, rows: int | None) -> None:
    """Raises BadInput for a row of which lm-eval cannot make a question with an answer: test sets are published with
    the label -1 or an empty one, and the harness would count such a row as answered wrongly."""
    for split in ["test", *(["fewshot"] if task.shots else [])]:
        for number, doc in enumerate(islice(part.dataset[split], rows if split == "test" else None), 1):
            try:
                part.doc_to_text(doc)
                target = part.doc_to_target(doc)
                chooses = part.OUTPUT_TYPE == "multiple_choice" and not part.multiple_input
                problem = _label_problem(target, part.doc_to_choice(doc)) if chooses else None
            except Exception as error:  # whatever a prompt makes of a field that is missing or of another type
                problem = f"{type(error).__name__}: {first_line(error)}"
            if problem is None and task.name in CONTAINS:
                problem = _answers_problem(doc["answers"])
            if problem is not None:
                where = doc.get(WHERE) or f"row {number} of split {split}"
                raise BadInput(f"{where}: does not fit task {task.name}: {problem}")


def _label_problem(target: Any, choices: Sequence[str]) -> str | None:
    for label in target if isinstance(target, list) else [target]:
        there = label in choices if isinstance(label, str) else type(label) is int and 0 <= label < len(choices)
        if not there:
            return f"its label is {label!r}, none of its {len(choices)} choices; labels of test sets are often hidden"
    return None


def _answers_problem(answers: Any) -> str | None:
    if isinstance(answers, list) and answers and all(isinstance(answer, str) for answer in answers):
        return None
    return "`answers` should be a list of texts"


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether an answer stands in the continuation, in any case: how the recall tasks of Based are scored."""
    said = results[0].lower()
    return {"contains": float(any(answer.strip() and answer.lower() in said for answer in doc["answers"]))}


def _load(manager: TaskManager, task: Task, data_dir: Path | None) -> Any:
    """lm-eval's loaded task, with the shots and the seeds that its own command line would set. Raises BadInput."""
    if task.name not in manager.task_index:
        raise BadInput(f"task {task.name}: lm-eval knows no such task")
    if task.name in manager.all_tags:
        raise BadInput(
            f"task {task.name}: is a tag; name its tasks {', '.join(sorted(manager.task_index[task.name].tags))}"
        )
    random.seed(DEFAULT_RANDOM_SEED)  # some tasks shuffle their choices
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        loaded = manager.load(task.name)
    except BadInput:
        raise
    except Exception as error:  # whatever the hub, or rows that lack what the prompt names, make the libraries raise
        why = f"{type(error).__name__}: {first_line(error)}"
        if data_dir is None:
            what = "its data cannot be had from the hub (or give --data DIR)"
            raise BadInput(f"task {task.name}: {what}: {why}") from error
        row = _first_bad_row(manager, task, data_dir)
        raise BadInput(f"{row}: does not fit task {task.name}: {why}") from error
    metrics = {metric for part in loaded["tasks"].values() for metric in part.aggregation()}
    for metric in task.metrics:
        if metric not in metrics:
            raise BadInput(f"task {task.name}: has no metric {metric!r}; use one of {', '.join(sorted(metrics))}")
    for part in loaded["tasks"].values():
        if data_dir is not None and part.config.process_docs is not None:  # once: lm-eval does it five times
            part.dataset = {split: part.config.process_docs(rows) for split, rows in part.dataset.items()}
            part.config.process_docs = None
        part.set_config(key="num_fewshot", value=task.shots)
        part.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def _first_bad_row(manager: TaskManager, task: Task, data_dir: Path) -> str:
    """File and line of the first row with which lm-eval cannot load the task, which itself says nothing of it: the last
    of the fewest rows that fail."""
    file = local_files(task, data_dir)["test"]
    rows = _rows(file, os.stat(file).st_mtime_ns)

    def fails(count: int) -> bool:
        _first_rows.set(count)
        try:
            manager.load(task.name)
        except Exception:
            return True
        finally:
            _first_rows.set(None)
        return False

    few = bisect.bisect_left(range(1, len(rows)), True, key=fails)
    return rows[few][WHERE] if task.name != "mmlu" else str(file)  # whose rows are spread over many tasks


def _flatten(task: Task, results: Mapping[str, Any]) -> dict[str, Measurement]:
    """lm-eval's "acc,none" and "acc_stderr,none" -> "task/acc"; a metric behind several filters keeps their names."""
    found = {}
    for metric in task.metrics:
        filters = [key.partition(",")[2] for key in results if key.partition(",")[0] == metric]
        if not filters:
            raise BadInput(f"task {task.name}: gives {metric} of its parts only; name those instead")
        for name in filters:
            stderr = results[f"{metric}_stderr,{name}"]
            measured = measurement(
                float(results[f"{metric},{name}"]), None if stderr == "N/A" else float(stderr), results["sample_len"]
            )
            found[f"{task.name}/{metric}" + (f",{name}" if len(filters) > 1 else "")] = measured
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps lm-eval from printing, and from resampling in processes of its own, each of which would import torch."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.environ.pop("DISABLE_MULTIPROC")
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


class _Harness(HFLM):
    """lm-eval's wrapper of a Hugging Face model, with its bars replaced by our progress."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, dtype: torch.dtype, report: Report):
        low = dtype != torch.float32
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype=dtype if low else None,
        )
        self.done = self.total = 0
        self.task, self.report, self.products = "", report, dtype
        self.set_cache_hook(_Finished(self))

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list:
        self._begin(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list:
        # a document is read in windows of the model's length, each of them a request to _loglikelihood_tokens
        lengths = (len(self.tok_encode(request.args[0])) for request in requests)
        self._begin(requests, sum(-(-length // self.max_length) for length in lengths))
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list:
        self._begin(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = True, override_bs: int | None = None) -> list:
        """[(log-probability, whether it is the greedy one)] of the continuations of [(_, context, continuation)].

        What lm-eval's own finds, sooner: inputs that several requests share run once, logits exist for continuations
        alone, and a GPU is waited for once a batch and not twice a request.
        """
        sharing: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            sharing.setdefault(tuple([*context, *continuation][-self.max_length - 1 : -1]), []).append(i)
        inputs = sorted(sharing, key=len, reverse=True)  # the longest first: what does not fit fails at once
        answers: dict[int, tuple[float, bool]] = {}
        with (
            torch.inference_mode(),
            autocast(self.device, self.products),
        ):  # one for all: it then casts each weight once
            for start in range(0, len(inputs), self.batch_size):
                batch = inputs[start : start + self.batch_size]
                asked = [(row, i) for row, ids in enumerate(batch) for i in sharing[ids]]
                answers |= zip([i for _, i in asked], self._answers(batch, [(row, requests[i][2]) for row, i in asked]))
                self.report(self.done + len(answers), self.total, self.task)
        self.done += len(answers)  # a rolling likelihood asks for a batch of its windows at a time
        return [answers[i] for i in range(len(requests))]

    def _answers(self, batch: list[tuple[int, ...]], asked: list[tuple[int, list[int]]]) -> list[tuple[float, bool]]:
        """Of (row of the batch, the continuation that the row ends in but for its last token)."""
        ids_BT = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
        for row, ids in enumerate(batch):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        places = [
            (row, len(batch[row]) - len(tokens) + j, token, answer)
            for answer, (row, tokens) in enumerate(asked)
            for j, token in enumerate(tokens)
        ]
        row_N, column_N, targets_N, answer_N = torch.tensor(places).to(self.device).unbind(1)
        losses_N, greedy_N = target_losses(self.model, ids_BT.to(self.device), row_N, column_N, targets_N)
        missed_N = torch.stack([losses_N, (~greedy_N).float()], 1)
        sums_A2 = torch.zeros(len(asked), 2, device=self.device).index_add_(0, answer_N, missed_N)
        return [(-loss, not misses) for loss, misses in sums_A2.tolist()]

    def _begin(self, requests: list, total: int | None = None) -> None:
        self.done, self.total = 0, len(requests) if total is None else total
        self.task = requests[0].task_name


class _Nobody(LM):
    """Answers everything alike, at once."""

    def loglikelihood(self, requests: list) -> list:
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list) -> list:
        return [-1.0] * len(requests)

    def generate_until(self, requests: list) -> list:
        return [""] * len(requests)


class _Finished(CacheHook):
    """lm-eval tells its response cache of every finished request; there is no cache, but this tells the progress of
    generation. Likelihoods are told by `_loglikelihood_tokens`, and must not count twice."""

    def __init__(self, harness: _Harness):
        super().__init__(None)
        self.harness = harness

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        harness = self.harness
        if attr == "generate_until":
            harness.done += 1
            harness.report(harness.done, harness.total, harness.task)
