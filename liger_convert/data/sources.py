"""Sources of rows: the documentation that comes with Python, a file, or a dataset from the Hugging Face hub.

A row is a JSON value with a name for error messages. `documents.py` interprets its columns (text, Alpaca, messages).
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_convert.config.sources import FileSource, HubSource, PydocSource
from liger_convert.data.row_files import DataRow, file_rows, without_nulls
from liger_convert.utils.errors import BadInput, first_line

# Answers about long topics are cut after the last paragraph within this length, so that question and answer fit in a
# row.
ANSWER_CHARS = 2000
# Texts that are shorter than this, once repeated paragraphs are removed, are dropped.
MIN_CHARS = 200


def rows(source: PydocSource | FileSource | HubSource, *, validation: bool = False) -> Iterator[DataRow]:
    """The rows of `source`. With `validation`, those of the file or split that `source.validation` names, if it does.

    Raises BadInput for a source that cannot be read.
    """
    if isinstance(source, PydocSource):
        return pydoc_rows(questions=source.format == "messages")
    if isinstance(source, FileSource):
        return file_rows(Path(source.validation if validation and source.validation else source.path))
    return hub_rows(source, source.validation if validation and source.validation else source.split)


def hub_rows(source: HubSource, split: str) -> Iterator[DataRow]:
    """Yields the rows of one split of a hub dataset. Raises BadInput if it cannot be loaded."""
    import datasets

    where = f"hub data set {source.id}"
    try:
        dataset = datasets.load_dataset(source.id, source.name, split=split, revision=source.revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"{where}, split {split}: cannot be loaded ({first_line(error)})") from None
    for number, value in enumerate(dataset):
        yield DataRow(f"{where}, split {split}, row {number}", without_nulls(value))


def pydoc_rows(*, questions: bool) -> Iterator[DataRow]:
    """Yields the language reference (`pydoc_data.topics`) and the standard library's docstrings, in a fixed order.

    There is one text for each topic and module. With `questions`, there is one question with an answer for each section
    and docstring. Rows of the same topic or module share a key. Docstrings are parsed from source files; no module of
    the standard library is run for it.
    """
    for key, text in _topics().items():
        entries = _sections(text) if questions else [("", text)]
        for title, body in entries:
            yield _documentation(f"topic {key}", f"Explain the Python topic: {title}" if questions else None, body)
    for module, docstrings in _standard_library():
        if questions:
            for kind, name, text in docstrings:
                yield _documentation(f"module {module}", f"What does the Python {kind} {name} do?", text)
        else:
            text = "\n\n".join(f"{name}\n\n{text}" for _, name, text in docstrings)
            yield _documentation(f"module {module}", None, text)


def reference_rows() -> Iterator[DataRow]:
    """Yields only the language reference, one text per topic. It is available in every Python installation."""
    for key, text in _topics().items():
        yield _documentation(f"topic {key}", None, text)


def _documentation(key: str, question: str | None, text: str) -> DataRow:
    where = f"documentation of {key}"
    if question is None:
        return DataRow(where, {"text": text}, key)
    answer = _cut(text, ANSWER_CHARS)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return DataRow(where, {"messages": messages}, key)


def _topics() -> dict[str, str]:
    """The text of each topic, by name.

    Topics contain one another: `compound` has all of `for`. So each paragraph is kept only in the longest topic that
    has it. Otherwise, parts of a held-out topic would be trained on.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = {}
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        # compared by word characters only, since the underline of a title differs between topics
        paragraphs = {paragraph: re.sub(r"\W+", "", paragraph) for paragraph in text.strip("\n").split("\n\n")}
        new = "\n\n".join(paragraph for paragraph, letters in paragraphs.items() if letters not in seen)
        seen.update(paragraphs.values())
        if len(new) >= MIN_CHARS:
            kept[name] = new
    return dict(sorted(kept.items()))


def _sections(topic: str) -> Iterator[tuple[str, str]]:
    """Yields (title, body) for each titled section of a topic, in order."""
    _, *parts = re.split(r"^(\S.*)\n([*=\-~^])\2{2,}$", topic, flags=re.MULTILINE)
    for title, body in zip(parts[::3], parts[2::3]):
        if len(body.strip()) >= MIN_CHARS:
            yield title, body.strip("\n")


def _cut(text: str, size: int) -> str:
    """`text` up to the last paragraph that ends within `size` characters, or else up to the end of the first one."""
    if len(text) <= size:
        return text
    end = text.rfind("\n\n", 0, size)
    if end < 0:
        end = text.find("\n\n", size)
    return text if end < 0 else text[:end]


def _standard_library() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yields (module, [(kind, qualified name, docstring)]) for every public standard-library module with docstrings."""
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()  # modules such as posixpath and ntpath share docstrings
    for top in sorted(sys.stdlib_module_names):
        single = library / f"{top}.py"
        for path in [single] if single.is_file() else sorted((library / top).rglob("*.py")):
            parts = [part for part in path.relative_to(library).with_suffix("").parts if part != "__init__"]
            if any(part.startswith("_") or part in ("test", "tests") for part in parts):
                continue
            module = ".".join(parts)
            found = _docstrings(ast.parse(path.read_bytes()), "module", module)
            new = [entry for entry in found if entry[2] not in seen]
            seen.update(text for _, _, text in new)
            if new:
                yield module, new


def _docstrings(node: Any, kind: str, name: str) -> Iterator[tuple[str, str, str]]:
    text = ast.get_docstring(node)
    if text is not None and len(text) >= MIN_CHARS:
        yield kind, name, text
    if kind not in ("module", "class"):
        return
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            function = "method" if kind == "class" else "function"
            child_kind = "class" if isinstance(child, ast.ClassDef) else function
            yield from _docstrings(child, child_kind, f"{name}.{child.name}")
