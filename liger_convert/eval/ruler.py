"""RULER (arXiv 2404.06654): lm-eval writes the texts of these tasks itself, each of a given length in tokens. Here the
model's own tokenizer counts them, and what lm-eval would fetch is read from local files."""

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
# What a row of each file holds: what the hub's data sets have, or shorter forms of it.
FORMS = {
    ESSAYS: "a `text` of prose",
    SQUAD: "a `context`, a `question` and a list `answers`, as the hub's squad and squad_v2 have them",
    HOTPOT: "a `context` of titles and sentences, a `question` and an `answer`, as the hub's hotpot_qa has them",
}


class Maker(NamedTuple):
    """How lm-eval makes a task: a module of its, the function for all texts, the one for those of one length, and the
    local file that they take."""

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
GROUP = "ruler"  # all of them, and their mean
NAMES = frozenset({*MAKERS, GROUP})
FILES = {name: [maker.file] if maker.file else [] for name, maker in MAKERS.items()} | {GROUP: list(FORMS)}
LEAST = 1024  # the tokens of a text in which every task has room
ROWS = 500  # of a task and length, where no limit says fewer: what lm-eval makes
SEED = 42
asked: ContextVar[tuple[Any, int]] = ContextVar("the tokenizer that says how long a text is, and how many to make")


def write_task(name: str, task_id: str, length: str, files: dict[str, Path], stock: Path, folder: Path) -> None:
    """Writes the YAML `task_id` into `folder`: lm-eval's task `name`, whose YAML is in `stock`, with texts of one
    `length`; of GROUP one for each task as well."""
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
    """What lm-eval gets for the data set of `task`: texts of up to `length` tokens of the tokenizer in `asked`, with
    what is asked of them. The same for every model that shares the tokenizer. Raises BadInput."""
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
            # where lm-eval takes all passages it shuffles their one list, and no question would find its own again
            replaced["generate_input_output"] = lambda *args, docs, **rest: ask(*args, docs=list(docs), **rest)
    make_rows: Callable[..., list[dict[str, Any]]] = getattr(module, maker.rows)

    def fewer_rows(*args: Any, num_samples: int = ROWS, **kwargs: Any) -> list[dict[str, Any]]:
        return make_rows(*args, num_samples=min(num_samples, count), **kwargs)

    replaced[maker.rows] = fewer_rows
    # where the rows are made, bars are drawn, sentences told apart by data of nltk's, and draws go on from earlier ones
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
    if not all(made["test"]["outputs"]):  # of words of which not one fits
        raise BadInput(f"{why}: they leave no room for the question")
    return made


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the answers that stand in the continuation, as lm-eval scores it."""
    from lm_eval.tasks.ruler.common_utils import process_results

    length = str(doc["max_length"])
    return {length: process_results(doc, results)[length]}


def sentences(text: str) -> list[str]:
    """`text` cut behind every `.`, `!` and `?` that a space follows; lm-eval asks nltk, whose data would be fetched."""
    return re.split(r"(?<=[.!?])\s+", text)


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Keeps lm-eval's modules from fetching nltk's data when they are imported."""
    with patch("nltk.download", lambda *_, **__: False):
        yield


def read(stem: str | None, path: Path) -> Any:
    """What a local file holds for lm-eval: the words of the essays, or questions and passages. Raises BadInput."""
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
                if answers:  # squad_v2 has questions without
                    found.append((query, answers, passage))
            case _:
                raise BadInput(f"{row.where}: should have {FORMS[SQUAD]}")
    if not found:
        raise BadInput(f"{path}: has no question with an answer")
    passages = sorted(titles)
    place = {passage: i for i, passage in enumerate(passages)}
    # passages of the same article come before those of others
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
    """Raises BadInput for a file too short for texts of `length`: lm-eval would make shorter ones and not say so."""
    tokens = 0
    for piece in pieces:
        tokens += len(tokenizer(piece, verbose=False)["input_ids"])
        if tokens >= length:
            return
    raise BadInput(f"{file}: its {tokens} tokens are too few for texts of {length}; give a longer one")


def _require_room(module: Any, tokenizer: Any, length: int, why: str) -> None:
    """Raises BadInput where lm-eval's loop over texts of ruler_vt would not end: where the shortest example has no room
    in 500 tokens, or the shortest text behind it. The answer takes 30; names of variables differ by under 50."""
    for noises, room, example in ((5, 500, True), (10, length - 500, False)):
        text, _ = module.generate_input_output(noises, 1, 4, is_icl=example)
        if len(tokenizer(text)["input_ids"]) + 80 > room:
            raise BadInput(f"{why}: they leave no room for the question")
