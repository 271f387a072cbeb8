"""Runs lm-eval's tasks on a loaded model: checks their rows, evaluates them, and converts their results."""

from __future__ import annotations

import bisect
import contextlib
import io
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
from huggingface_hub import constants
from lm_eval.api.model import LM, CacheHook
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from liger_convert.eval import ruler
from liger_convert.eval.generation import plain_decoding
from liger_convert.eval.measures import Measurement, measurement, target_losses
from liger_convert.eval.suites import Task, local_files
from liger_convert.eval.task_files import OWN_PROBLEMS, WHERE, first_rows, local_rows, no_exit, task_managers
from liger_convert.io.files import scratch_folder
from liger_convert.io.tokenizer import closes_texts
from liger_convert.model.bases import context_length
from liger_convert.utils.device import autocast
from liger_convert.utils.errors import BadInput, LinearizeError, first_line
from liger_convert.utils.progress import Report

_sound: set[tuple[Any, ...]] = set()  # the states of task files that `check_rows` has found valid
REHEARSED = 32  # rows of a task in a rehearsal; all rows of a large task would take minutes
WRITTEN = 1  # the same for RULER's tasks, which generate their rows
EMPTY_ANSWER = "a likelihood needs an answer that is not empty"
BOOTSTRAP = 1000  # resamples for the standard error of metrics without a formula for it


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    data_dir: Path | None,
    limit: int | None,
    batch_size: int,
    dtype: torch.dtype,
    is_wanted: Callable[[str], bool],
    report: Report,
) -> Iterator[tuple[str, dict[str, Measurement]]]:
    """Runs the tasks on `model`. Yields the id of each task and its results, {"task/metric": measurement}; n =
    documents. A measurement has a further entry `cut` if prompts were longer than the model's context, and lost their
    beginnings: how many.

    data_dir: a folder of local files (`suites.LOCAL_FILES`) to read instead of datasets from the hub. A task with an
    `include_path` reads what its own YAML says. limit: replaces the limits of the tasks. dtype: the compute dtype.
    is_wanted: called with a task's id before it is loaded; tasks that are not wanted are left out.

    Raises BadInput for an unknown task or metric, and for data that cannot be loaded or does not fit its task.
    """
    harness = _Harness(model, tokenizer, batch_size, dtype, report)
    for task, _, results in _evaluated(harness, tokenizer, tasks, data_dir, limit, BOOTSTRAP, is_wanted):
        yield task.id, _flatten(task, results, cut=len(harness.cut))


def rehearse_tasks(
    tasks: Sequence[Task],
    tokenizer: Any,
    *,
    data_dir: Path | None,
    limit: int | None,
    positions: int | None,
    report: Report,
) -> None:
    """Does what `run_tasks` does with made-up answers instead of a model, on the first REHEARSED rows of each task.

    So problems with a task, its data or its metrics are found before training, not after it. Labels in data from the
    hub are checked in all rows. positions: the model's maximum context; None if unknown. Raises BadInput for any
    problem.
    """
    tasks = [part for task in tasks for part in task.each]
    for done, task in enumerate(tasks, 1):
        rows = limit or task.limit
        try:
            most = WRITTEN if task.of_ruler else REHEARSED
            few = most if rows is None else min(rows, most)
            ((_, loaded, results),) = _evaluated(_Nobody(), tokenizer, [task], data_dir, few, 0)
        except LinearizeError:
            raise
        except Exception as error:  # anything that lm-eval raises over rows that do not fit
            why = f"its rows do not fit the task: {type(error).__name__}: {first_line(error)}"
            raise BadInput(f"task {task.name}: {why}") from error
        _flatten(task, results)
        for part in loaded["tasks"].values():
            if data_dir is None and task.include_path is None:  # `check_rows` checks all other rows
                _check_labels(task, part, rows)
            if part.OUTPUT_TYPE == "generate_until":
                _check_generation(task, part.config.generation_kwargs or {}, tokenizer, positions)
        report(done, len(tasks), task.name)


def _check_generation(task: Task, settings: dict[str, Any], tokenizer: Any, positions: int | None) -> None:
    """Raises BadInput for a task's `generation_kwargs` with which no model of so many `positions` can answer. Lets a
    model of a few weights write one token with them."""
    where = f"task {task.name}: generation_kwargs"
    try:
        known = normalize_gen_kwargs(settings)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: {first_line(error)}") from None
    room, stops = known.pop("max_gen_toks"), known.pop("until", [])
    if not all(isinstance(stop, str) for stop in stops):
        raise BadInput(f"{where}.until: should be a text that ends an answer, or a list of such texts, not {stops}")
    if unknown := [name for name in known if not hasattr(GenerationConfig(), name)]:
        raise BadInput(f"{where}.{unknown[0]}: transformers has no such setting")
    if "cache_implementation" in known:
        raise BadInput(f"{where}.cache_implementation: is not supported; leave it out")
    if room < 1:
        raise BadInput(f"{where}.max_gen_toks: should be at least 1, not {room}")
    sizes: Any = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 2)
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    writer = _Harness(tiny, tokenizer, 1, torch.float32, lambda *_: None)
    try:
        writer._model_generate(torch.ones(1, 1, dtype=torch.long), 2, stops, **known)
    except Exception as error:  # whatever transformers raises over a value
        raise BadInput(f"{where}: {first_line(error)}") from error
    if positions is not None and room >= positions:
        raise BadInput(f"task {task.name}: answers take {room} tokens, but the base supports only {positions} in all")


def _check_labels(task: Task, part: Any, rows: int | None) -> None:
    """Raises BadInput for a label in data from the hub that is not one of the choices. `check_rows` does so for local
    rows."""
    if part.OUTPUT_TYPE != "multiple_choice" or part.multiple_input:
        return
    for number, doc in enumerate(islice(part.eval_docs, rows), 1):
        if (problem := _label_problem(part.doc_to_target(doc), part.doc_to_choice(doc))) is not None:
            raise BadInput(f"task {task.name}: row {number}: {problem}")


def _evaluated(
    lm: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    data_dir: Path | None,
    limit: int | None,
    bootstrap: int,
    is_wanted: Callable[[str], bool] = lambda task_id: True,
) -> Iterator[tuple[Task, Any, dict[str, Any]]]:
    """Yields each wanted task, lm-eval's loaded task, and its results on `lm`."""
    with scratch_folder() as folder:
        with _quiet():
            managers = task_managers(tasks, data_dir, folder)
        for task in tasks:
            if not is_wanted(task.id):
                continue
            with _quiet():
                rows = limit or task.limit
                ruler.asked.set((tokenizer, rows or ruler.ROWS))
                loaded = _load(managers[task.include_path], task, data_dir)
                # not simple_evaluate, which also collects information from git, pip and the hub for every task
                try:
                    with no_exit(task):
                        results = lm_eval.evaluate(lm, loaded, limit=rows, bootstrap_iters=bootstrap, log_samples=False)
                except (ValueError, ArithmeticError) as error:
                    if not lm.answered:
                        raise
                    why = f"{type(error).__name__}: {first_line(error)}"
                    raise BadInput(f"task {task.name}: its metrics cannot score these answers: {why}") from error
            yield task, loaded, results["results"][task.id]


def check_rows(tasks: Sequence[Task], data_dir: Path | None, limit: int | None) -> None:
    """Checks the rows that will be evaluated. tasks: those with local files in `data_dir` or an `include_path`.

    Needs no model, so it can run before any long work. Local files that were found valid are not checked again until
    they change. Raises BadInput, naming file and line if known, for a row that does not fit its task.
    """

    def state(task: Task) -> tuple[Any, ...] | None:
        if task.include_path is not None or data_dir is None:
            return None
        files = local_files(task, data_dir).values()
        return task.name, task.shots, limit or task.limit, *((file, os.stat(file).st_mtime_ns) for file in files)

    if new := [task for task in tasks if state(task) not in _sound]:
        with scratch_folder() as folder, _quiet():
            managers = task_managers(new, data_dir, folder)
            for task in new:
                for part in _load(managers[task.include_path], task, data_dir)["tasks"].values():
                    with no_exit(task):
                        _check_docs(task, part, limit or task.limit)
                if (checked := state(task)) is not None:
                    _sound.add(checked)


def _check_docs(task: Task, part: Any, rows: int | None) -> None:
    """Raises BadInput for a row from which lm-eval cannot make a question with an answer.

    Some test sets are published with labels of -1 or empty labels, and lm-eval would count every answer to such a row
    as wrong.
    """
    splits: dict[str, Iterator[Any]] = {"test": islice(part.eval_docs, rows)}
    if part.config.num_fewshot:
        splits["fewshot"] = iter(part.fewshot_docs() or ())
    for split, docs in splits.items():
        for number, doc in enumerate(docs, 1):
            try:
                part.doc_to_text(doc)
                target = part.doc_to_target(doc)
                chooses = part.OUTPUT_TYPE == "multiple_choice" and not part.multiple_input
                choices = part.doc_to_choice(doc) if chooses else []
                problem = _label_problem(target, choices) if chooses else None
                if problem is None and task.include_path is None:
                    answers = choices if chooses else [target] * (part.OUTPUT_TYPE == "loglikelihood")
                    own = OWN_PROBLEMS.get(task.name)
                    problem = "an answer is empty" if not all(map(str.strip, answers)) else own and own(doc)
            except Exception as error:  # anything that a prompt raises over a missing field or a wrong type
                problem = f"{type(error).__name__}: {first_line(error)}"
            if problem is not None:
                where = doc.get(WHERE) or f"row {number} of split {split}"
                raise BadInput(f"{where}: does not fit task {task.name}: {problem}")


def _label_problem(target: Any, choices: Sequence[str]) -> str | None:
    for label in target if isinstance(target, list) else [target]:
        there = label in choices if isinstance(label, str) else type(label) is int and 0 <= label < len(choices)
        if not there:
            return f"its label {label!r} is not one of its {len(choices)} choices; labels of test sets are often hidden"
    return None


def _load(manager: TaskManager, task: Task, data_dir: Path | None) -> Any:
    """lm-eval's loaded task, with the number of shots, and the seeds of lm-eval's own command line.

    Raises BadInput for an unknown task or metric, and for data that cannot be loaded.
    """
    if task.id not in manager.task_index:
        there = "lm-eval knows" if task.include_path is None else f"{task.include_path} has"
        raise BadInput(f"task {task.name}: {there} no such task")
    if task.name in manager.all_tags:
        raise BadInput(
            f"task {task.name}: is a tag; name its tasks {', '.join(sorted(manager.task_index[task.name].tags))}"
        )
    random.seed(DEFAULT_RANDOM_SEED)  # some tasks shuffle their choices
    np.random.seed(DEFAULT_OTHER_SEED)
    # both download nltk data on import; ifeval may do so if the hub is used
    offline = task.of_ruler or (task.name == "ifeval" and (data_dir is not None or constants.HF_HUB_OFFLINE))
    try:
        with ruler.nothing_fetched() if offline else contextlib.nullcontext(), no_exit(task):
            loaded = manager.load(task.id)
    except BadInput:
        raise
    except ImportError as error:  # from an import in the task's own Python files
        raise BadInput(f"task {task.name}: needs a package that is not installed: {first_line(error)}") from error
    except Exception as error:  # anything that the libraries raise over the hub, or over rows that lack a field
        why = f"{type(error).__name__}: {first_line(error)}"
        if task.include_path is not None:
            raise BadInput(f"task {task.name} of {task.include_path}: cannot be loaded: {why}") from error
        if data_dir is None:
            what = "its data cannot be fetched from the hub (or give --data DIR)"
            raise BadInput(f"task {task.name}: {what}: {why}") from error
        where, row = _first_bad_row(manager, task, data_dir)
        if row is not None and (own := OWN_PROBLEMS.get(task.name)) is not None:
            with contextlib.suppress(KeyError):  # a field is missing, as lm-eval has said
                why = own(row) or why
        raise BadInput(f"{where}: does not fit task {task.name}: {why}") from error
    metrics = {metric for part in loaded["tasks"].values() for metric in part.aggregation()}
    for metric in task.metrics:
        if metric not in metrics:
            raise BadInput(f"task {task.name}: has no metric {metric!r}; use one of {', '.join(sorted(metrics))}")
    for part in loaded["tasks"].values():
        local = data_dir is not None and task.include_path is None
        if local and part.config.process_docs is not None:  # here once, because lm-eval would do it five times
            part.dataset = {split: part.config.process_docs(rows) for split, rows in part.dataset.items()}
            part.config.process_docs = None
        own = part.config.num_fewshot if task.include_path is not None else None
        part.set_config(key="num_fewshot", value=task.shots if task.shots is not None else own or 0)
        part.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def _first_bad_row(manager: TaskManager, task: Task, data_dir: Path) -> tuple[str, dict[str, Any] | None]:
    """The file and line of the first row with which lm-eval cannot load the task, and the row; lm-eval's own error does
    not say.

    Found by bisection: it is the last row of the shortest prefix of rows that fails. For mmlu, only the file.
    """
    file = local_files(task, data_dir)["test"]
    rows = local_rows(file, os.stat(file).st_mtime_ns)

    def fails(count: int) -> bool:
        first_rows.set(count)
        try:
            manager.load(task.name)
        except Exception:
            return True
        finally:
            first_rows.set(None)
        return False

    if task.name == "mmlu":  # its rows are spread over many tasks
        return str(file), None
    row = rows[bisect.bisect_left(range(1, len(rows)), True, key=fails)]
    return row[WHERE], row


def _flatten(task: Task, results: Mapping[str, Any], cut: int = 0) -> dict[str, Measurement]:
    """Converts lm-eval's "acc,none" and "acc_stderr,none" to "task/acc". A metric with several filters keeps their
    names ("task/acc,filter"). Raises BadInput if a group has the metric only in its parts."""
    found = {}
    for metric in task.metrics:
        filters = [key.partition(",")[2] for key in results if key.partition(",")[0] == metric]
        if not filters:
            raise BadInput(f"task {task.name}: has {metric} only for its parts; name those instead")
        for name in filters:
            stderr = results[f"{metric}_stderr,{name}"]
            measured = measurement(
                float(results[f"{metric},{name}"]), None if stderr == "N/A" else float(stderr), results["sample_len"]
            )
            measured |= {"cut": cut} if cut else {}
            found[f"{task.name}/{metric}" + (f",{name}" if len(filters) > 1 else "")] = measured
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context that keeps lm-eval from printing, and from bootstrapping in subprocesses, which would each import
    torch."""
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
    """lm-eval's wrapper of a Hugging Face model, with our progress reports instead of its progress bars."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, dtype: torch.dtype, report: Report):
        low = dtype != torch.float32
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            # lm-eval would take the context before it was extended, if rope is scaled
            max_length=context_length(model.config),
            mixed_precision_dtype=dtype if low else None,
        )
        self.done = self.total = 0
        self.cut: set[str] = set()  # prompts of the current task that had no room
        self.answered = False  # whether all requests so far have their answers
        self.task, self.report, self.products = "", report, dtype
        self.closes_texts = closes_texts(tokenizer)
        self.set_cache_hook(_Finished(self))

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list:
        self._begin(requests)
        return self._end(super().loglikelihood(requests, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list:
        # a document is split into windows of the model's length, each one a request to _loglikelihood_tokens
        lengths = (len(self.tok_encode(request.args[0])) for request in requests)
        self._begin(requests, sum(-(-length // self.max_length) for length in lengths))
        return self._end(super().loglikelihood_rolling(requests, disable_tqdm=True))

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list:
        torch.manual_seed(DEFAULT_OTHER_SEED)  # for tasks that sample
        self._begin(requests)
        return self._end(super().generate_until(requests, disable_tqdm=True))

    def tok_encode(self, string: str, *args: Any, **options: Any) -> list[int]:
        ids = super().tok_encode(string, *args, **options)
        return ids[:-1] if self.closes_texts and ids[-1:] == [self.tokenizer.eos_token_id] else ids

    def tok_batch_encode(
        self, strings: list[str], *args: Any, left_truncate_len: int | None = None, **options: Any
    ) -> Any:
        if left_truncate_len is not None:  # no token is shorter than a byte, and one may be added
            long = [text for text in strings if len(text.encode()) + 1 > left_truncate_len]
            self.cut.update(text for text in long if len(self.tok_encode(text)) > left_truncate_len)
        if not self.closes_texts:
            return super().tok_batch_encode(strings, *args, left_truncate_len=left_truncate_len, **options)
        most = None if left_truncate_len is None else left_truncate_len + 1
        ids_BT, mask_BT = super().tok_batch_encode(strings, *args, left_truncate_len=most, **options)
        return ids_BT[:, :-1], mask_BT[:, :-1]  # padding is on the left

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with plain_decoding(self.model):
            return super()._model_generate(*args, **kwargs)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = True, override_bs: int | None = None) -> list:
        """[(log-probability, whether it is the greedy one)] of the continuations of [(_, context, continuation)].

        The results are those of lm-eval's own method, but faster. Inputs that several requests share run once, logits
        are computed only for continuations, and the host waits for the GPU once per batch, not twice per request.
        Raises BadInput for a continuation without tokens, or longer than the model's context.
        """
        sharing: dict[tuple[int, ...], list[int]] = {}
        for i, (texts, context, continuation) in enumerate(requests):
            if not continuation:
                raise BadInput(f"task {self.task}: the answer {texts[1]!r} has no tokens; {EMPTY_ANSWER}")
            if len(continuation) > self.max_length:
                what = (
                    f"an answer has {len(continuation)} tokens, more than the {self.max_length} that the base supports"
                )
                raise BadInput(f"task {self.task}: {what}; it begins {texts[1][:40]!r}")
            if len(context) + len(continuation) > self.max_length + 1:
                self.cut.add(texts[0])
            sharing.setdefault(tuple([*context, *continuation][-self.max_length - 1 : -1]), []).append(i)
        inputs = sorted(sharing, key=len, reverse=True)  # longest first, to run out of memory at once if at all
        answers: dict[int, tuple[float, bool]] = {}
        with (
            torch.inference_mode(),
            autocast(self.device, self.products),
        ):  # a single autocast for all batches, which casts each weight only once
            for start in range(0, len(inputs), self.batch_size):
                batch = inputs[start : start + self.batch_size]
                asked = [(row, i) for row, ids in enumerate(batch) for i in sharing[ids]]
                answers |= zip([i for _, i in asked], self._answers(batch, [(row, requests[i][2]) for row, i in asked]))
                self.report(self.done + len(answers), self.total, self.task)
        self.done += len(answers)  # loglikelihood_rolling calls this several times
        return [answers[i] for i in range(len(requests))]

    def _answers(self, batch: list[tuple[int, ...]], asked: list[tuple[int, list[int]]]) -> list[tuple[float, bool]]:
        """Scores continuations in one batch, as in `_loglikelihood_tokens`. asked: (row, continuation), where the row
        ends with the continuation except for its last token. batch: token ids, the longest row first."""
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
        self.cut, self.answered = set(), False
        self.task = requests[0].task_name

    def _end(self, answers: list) -> list:
        self.answered = True
        return answers


class _Nobody(LM):
    """A stand-in for a model that gives the same answer to every request."""

    answered = True

    def loglikelihood(self, requests: list) -> list:
        for request in requests:
            if not request.args[1]:
                raise BadInput(f"task {request.task_name}: the answer '' has no tokens; {EMPTY_ANSWER}")
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list) -> list:
        return [-1.0] * len(requests)

    def generate_until(self, requests: list) -> list:
        return [""] * len(requests)


class _Finished(CacheHook):
    """Reports the progress of generation. lm-eval notifies its response cache, which this replaces, of every finished
    request. Likelihoods are ignored here, because `_loglikelihood_tokens` already reports them."""

    def __init__(self, harness: _Harness):
        super().__init__(None)
        self.harness = harness

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        harness = self.harness
        if attr == "generate_until":
            harness.done += 1
            harness.report(harness.done, harness.total, harness.task)
