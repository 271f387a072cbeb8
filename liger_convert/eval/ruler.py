"""RULER (arXiv 2404.06654), whose texts lm-eval generates with a given length in tokens.

This makes lm-eval count tokens with the model's own tokenizer, and read local files instead of downloading data.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import yaml

from liger_convert.data.row_files import file_rows
from liger_convert.io.inputs import require_file
from liger_convert.utils.errors import BadInput, refusing

if TYPE_CHECKING:
    import datasets

ESSAYS, SQUAD, HOTPOT = "ruler_essays", "ruler_qa_squad", "ruler_qa_hotpot"
# The columns of each local file: those of the hub's datasets, or a short form of them. Used in error messages.
FORMS = {
    ESSAYS: "a `text` of prose",
    SQUAD: "a `context`, a `question` and a list `answers`, as the hub's squad and squad_v2 have them",
    HOTPOT: "a `context` of titles and sentences, a `question` and an `answer`, as the hub's hotpot_qa has them",
}


class Maker(NamedTuple):
    """How lm-eval generates a task's texts.

    module: its module in lm-eval. texts: the function for all lengths. rows: the function for one length. file: the
    local file that they read, if any.
    """

    module: str
    texts: str
    rows: str
    file: str | None = None


def _needles(name: str, file: str | None = None) -> Maker:
    return Maker("niah_utils", name, "generate_samples", file)


MAKERS = {
    "niah_single_1": _needles("niah_single_1"),
    "niah_single_2": _needles("niah_single_2", ESSAYS),
    "niah_single_3": _needles("niah_single_3", ESSAYS),
    "niah_multikey_1": _needles("niah_multikey_1", ESSAYS),
    "niah_multikey_2": _needles("niah_multikey_2"),
    "niah_multikey_3": _needles("niah_multikey_3"),
    "niah_multiquery": _needles("niah_multiquery", ESSAYS),
    "niah_multivalue": _needles("niah_multivalue", ESSAYS),
    "ruler_vt": Maker("vt_utils", "get_vt_dataset", "sys_vartrack_w_noise_random"),
    "ruler_cwe": Maker("cwe_utils", "get_cw_dataset", "sys_word_pair_random"),
    "ruler_fwe": Maker("fwe_utils", "fwe_download", "sys_kwext"),
    "ruler_qa_squad": Maker("qa_utils", "get_squad", "generate_samples", SQUAD),
    "ruler_qa_hotpot": Maker("qa_utils", "get_hotpotqa", "generate_samples", HOTPOT),
}
GROUP = "ruler"  # all tasks and their mean
NAMES = frozenset({*MAKERS, GROUP})
FILES = {name: [maker.file] if maker.file else [] for name, maker in MAKERS.items()} | {GROUP: list(FORMS)}
LEAST = 1024  # minimum length of a text, in tokens, that every task fits into
ROWS = 500  # rows per task and length unless there is a lower limit; the same as in lm-eval
SEED = 42
asked: ContextVar[tuple[Any, int]] = ContextVar("the tokenizer that says how long a text is, and how many to make")


def write_task(name: str, task_id: str, length: str, files: dict[str, Path], stock: Path, folder: Path) -> None:
    """Writes the YAML file of the task `task_id` to `folder`: lm-eval's task `name` with texts of one `length`.

    For GROUP, also writes one file for each member. files: the local files, by name without suffix. stock: the folder
    of lm-eval's own tasks.
    """
    if name == GROUP:
        members = {f"{task_id}_{member}": member for member in MAKERS}
        for member_id, member in members.items():
            write_task(member, member_id, length, files, stock, folder)
        mean = {"metric": length, "weight_by_size": False}
        text = yaml.safe_dump({"group": task_id, "task": list(members), "aggregate_metric_list": [mean]})
    else:
        file = files.get(MAKERS[name].file or "")
        given = {"task": name, "length": int(length), "file": None if file is None else str(file)}
        text = yaml.safe_dump(
            {
                "include": str(stock / "ruler" / f"{name.removeprefix('ruler_')}.yaml"),
                "task": task_id,
                "metric_list": [{"metric": length, "aggregation": "mean", "higher_is_better": True}],
                "dataset_kwargs": given,
            }
        )
        text += f"custom_dataset: !function {__name__}.texts\nprocess_results: !function {__name__}.score\n"
    (folder / f"{task_id}.yaml").write_text(text)


def texts(task: str, length: int, file: str | None, **_: Any) -> dict[str, datasets.Dataset]:
    """The dataset of `task`, which lm-eval requests through `custom_dataset`: texts of up to `length` tokens, with
    questions and answers. Tokens are counted by the tokenizer in `asked`.

    The texts are the same for all models with the same tokenizer. file: the task's local file, if it needs one. Raises
    BadInput if the texts cannot be made.
    """
    tokenizer, count = asked.get()
    maker = MAKERS[task]
    module = import_module(f"lm_eval.tasks.ruler.{maker.module}")
    replaced: dict[str, Any] = {"get_tokenizer": lambda *_: tokenizer}
    if file is not None:
        kept = read(maker.file, Path(file))
        _require_tokens(file, [" ".join(kept[:length])] if maker.file == ESSAYS else kept[1], length, tokenizer)
        if maker.file == ESSAYS:
            replaced["get_haystack"] = lambda type_haystack: kept
        else:
            count, ask = min(count, len(kept[0])), module.generate_input_output
            replaced |= dict.fromkeys(("read_squad", "read_hotpotqa"), lambda: kept)
            # If lm-eval uses all passages, it shuffles the shared list in place, and the indices of later questions
            # would be wrong. So it gets a copy.
            replaced["generate_input_output"] = lambda *args, docs, **rest: ask(*args, docs=list(docs), **rest)
    make_rows: Callable[..., list[dict[str, Any]]] = getattr(module, maker.rows)

    def fewer_rows(*args: Any, num_samples: int = ROWS, **kwargs: Any) -> list[dict[str, Any]]:
        return make_rows(*args, num_samples=min(num_samples, count), **kwargs)

    replaced[maker.rows] = fewer_rows
    # In the module that generates the rows: no progress bars, no nltk data for splitting sentences, and a fresh random
    # state that does not depend on earlier calls.
    making = sys.modules[make_rows.__module__]
    quiet: dict[str, Any] = {"tqdm": lambda rows, **_: rows, "sent_tokenize": sentences, "RNG": random.Random(SEED)}
    quiet = {name: value for name, value in quiet.items() if hasattr(making, name)}
    random.seed(SEED)
    np.random.seed(SEED)
    why = f"task {task}: no texts of {length} tokens can be made for this tokenizer"
    with (
        refusing(why),
        patch.multiple(making, **quiet),
        patch.multiple(module, **replaced),
    ):
        if task == "ruler_vt":
            _require_room(module, tokenizer, length, why)
        made: dict[str, datasets.Dataset] = getattr(module, maker.texts)(max_seq_lengths=[length])
    if not all(made["test"]["outputs"]):  # not even one word fit into the text
        raise BadInput(f"{why}: they leave no room for the question")
    return made


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The fraction of the answers that occur in the continuation, scored by lm-eval. By metric: the text's length."""
    from lm_eval.tasks.ruler.common_utils import process_results

    length = str(doc["max_length"])
    return {length: process_results(doc, results)[length]}


def sentences(text: str) -> list[str]:
    """Splits `text` after every `.`, `!` and `?` that is followed by white space. lm-eval would use nltk, which would
    have to download data."""
    return re.split(r"(?<=[.!?])\s+", text)


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Context that keeps lm-eval's modules from downloading nltk data when they are imported."""
    with patch("nltk.download", lambda *_, **__: False):
        yield


def read(stem: str | None, path: Path) -> Any:
    """The content of a local file in lm-eval's form: the words of the essays, or (questions, passages).

    stem: the file's name without suffix, one of FORMS. Raises BadInput for a row that lacks the columns of FORMS.
    """
    reader = {ESSAYS: _essays, SQUAD: _squad, HOTPOT: _hotpot}[stem or ""]
    return reader(path, require_file(path).st_mtime_ns)


@lru_cache(maxsize=1)
def _essays(path: Path, _modified: int) -> list[str]:
    words: list[str] = []
    for row in file_rows(path):
        match row.value:
            case {"text": str(text)}:
                words += text.split()
            case _:
                raise BadInput(f"{row.where}: should have {FORMS[ESSAYS]}")
    return words


@lru_cache(maxsize=1)
def _squad(path: Path, _modified: int) -> tuple[list[dict[str, Any]], list[str]]:
    found, titles = [], {}
    for row in file_rows(path):
        match row.value:
            case {"context": str(passage), "question": str(query), "answers": {"text": [*answers]} | [*answers]} if all(
                isinstance(answer, str) for answer in answers
            ):
                titles[passage] = row.value.get("title")
                if answers:  # squad_v2 has questions without answers
                    found.append((query, answers, passage))
            case _:
                raise BadInput(f"{row.where}: should have {FORMS[SQUAD]}")
    if not found:
        raise BadInput(f"{path}: has no question with an answer")
    passages = sorted(titles)
    place = {passage: i for i, passage in enumerate(passages)}
    # passages of the same article are used as distractors before others
    near: dict[Any, list[int]] = {}
    for passage, title in titles.items():
        if title is not None:
            near.setdefault(title, []).append(place[passage])
    return [
        {
            "query": query,
            "outputs": answers,
            "context": [place[passage]],
            "more_context": [i for i in near.get(titles[passage], []) if i != place[passage]],
        }
        for query, answers, passage in found
    ], passages


@lru_cache(maxsize=1)
def _hotpot(path: Path, _modified: int) -> tuple[list[dict[str, Any]], list[str]]:
    found = []
    for row in file_rows(path):
        match row.value:
            case {"context": {"title": [*titles], "sentences": [*told]}, "question": str(query), "answer": str(answer)}:
                pairs = list(zip(titles, told))
            case {"context": [*pairs], "question": str(query), "answer": str(answer)}:
                pass
            case _:
                raise BadInput(f"{row.where}: should have {FORMS[HOTPOT]}")
        with refusing(f"{row.where}: should have {FORMS[HOTPOT]}"):
            found.append((query, answer, [f"{title}\n{''.join(told)}" for title, told in pairs]))
    passages = sorted({passage for _, _, there in found for passage in there})
    place = {passage: i for i, passage in enumerate(passages)}
    return [
        {"query": query, "outputs": [answer], "context": [place[passage] for passage in there]}
        for query, answer, there in found
    ], passages


def _require_tokens(file: str, pieces: Iterable[str], length: int, tokenizer: Any) -> None:
    """Raises BadInput if a file is too short for texts of `length` tokens; lm-eval would silently make shorter ones."""
    tokens = 0
    for piece in pieces:
        tokens += len(tokenizer(piece, verbose=False)["input_ids"])
        if tokens >= length:
            return
    raise BadInput(f"{file}: its {tokens} tokens are too few for texts of {length}; give a longer one")


def _require_room(module: Any, tokenizer: Any, length: int, why: str) -> None:
    """Raises BadInput if lm-eval's loop over texts of ruler_vt would not terminate.

    That happens if the shortest example does not fit in 500 tokens, or the shortest text does not fit in the rest. The
    margin of 80 tokens is 30 for the answer and 50 for variable names of different lengths.
    """
    for noises, room, example in ((5, 500, True), (10, length - 500, False)):
        text, _ = module.generate_input_output(noises, 1, 4, is_icl=example)
        if len(tokenizer(text)["input_ids"]) + 80 > room:
            raise BadInput(f"{why}: they leave no room for the question")
