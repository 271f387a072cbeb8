"""Rows become documents, and exactly the right tokens are trained on."""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from liger_convert.config.sources import FileSource, HubSource
from liger_convert.data.documents import Document, held_out_keys, load_source
from liger_convert.data.row_files import DataRow, file_rows
from liger_convert.data.sources import pydoc_rows
from liger_convert.utils.errors import BadInput

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Qwen3's: the last answer gets a block of (here empty) reasoning, which earlier answers lose
REASONING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# without the time of day, which would give two test processes two names for one test
GZIPPED = gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)

TALK = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is an apple?"},
    {"role": "assistant", "content": "A fruit."},
    {"role": "user", "content": "And a pear?"},
    {"role": "assistant", "content": "Another fruit, I think."},
]
ALPACA = {"instruction": "Name a fruit.", "input": "It is red.", "output": "An apple."}


@functools.cache
def _trained_bpe() -> Tokenizer:
    """Byte-level BPE with merges across what people write in one go, so that offsets matter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([message["content"] for message in TALK] * 3 + [CHATML, str(ALPACA)], trainer)
    return tokenizer


def bpe(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe().to_str()),
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=chat_template,
    )


def write(path: Path, rows: Any) -> FileSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSource(path=str(path))


def load(path: Path, format: str = "text", tokenizer: Any = None, **fields: Any) -> Any:
    return load_source(FileSource(path=str(path), format=format, **fields), tokenizer or bpe())


def learned(document: Document, tokenizer: Any) -> str:
    return tokenizer.decode(document.ids[document.loss])


# --- files


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    lines = b'{"text": "one apple"}\n\n{"text": "a p\\u00e4r"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.json").write_text('[{"text": "one apple"},\n {"text": "a pär"}]', encoding="utf-8-sig")
    for name in ("a.jsonl", "a.jsonl.xz", "a.jsonl.gz", "a.json"):
        texts = [bpe().decode(document.ids) for document in load(tmp_path / name).train]
        assert texts == ["one apple", "a pär"], name
    (tmp_path / "a.txt").write_text("one apple\n\na pear\n")
    (document,) = load(tmp_path / "a.txt").train
    assert bpe().decode(document.ids) == "one apple\n\na pear"
    assert document.loss.all()
    assert document.ids.dtype == np.int32


def test_a_parquet_file_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table([["first"], ["second"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a\.parquet: names the column 'text' twice"):
        load(tmp_path / "a.parquet")


def test_tables_and_lines_named_json_give_the_same_documents(tmp_path: Path) -> None:
    lines = b'{"n": 1, "text": "one, apple"}\r\n{"n": 2, "text": null}\n{"n": 3, "text": "a\\np\xc3\xa4r"}\n'
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines.splitlines()])
    (tmp_path / "a.json").write_bytes(lines)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf\n\nn,text,,\r\n1,"one, apple"\r\n2,\r\n3,"a\np\xc3\xa4r"\r\n')
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    names = [path.name for path in tmp_path.iterdir()]
    for name in names:
        documents = load(tmp_path / name)
        assert [bpe().decode(document.ids) for document in documents.train] == ["one, apple", "a\npär"], name
        assert documents.skipped == 1, name
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / "more").mkdir()
    (tmp_path / "more/b.jsonl").write_text('{"text": "more"}\n')
    assert len(load(tmp_path).train) == 2 * len(names) + 1


def test_a_long_text_is_cut_into_documents_and_nothing_is_lost(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {i} " + "x" * 90 for i in range(2000)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    (tmp_path / "line.txt").write_text(" ".join(paragraphs))  # one line, as text8 is
    (tmp_path / "word.txt").write_text("ä" * 100_000)
    found = [row.value["text"] for row in file_rows(tmp_path / "a.txt")]
    assert len(found) > 5
    assert "\n\n".join(found) == "\n\n".join(paragraphs)
    assert " ".join(row.value["text"] for row in file_rows(tmp_path / "line.txt")) == " ".join(paragraphs)
    assert "".join(row.value["text"] for row in file_rows(tmp_path / "word.txt")) == "ä" * 100_000
    documents = load(tmp_path / "a.txt", held_out=0.01)
    assert (len(documents.train), len(documents.held_out)) == (len(found) - 1, 1)
    (tmp_path / "a.txt").write_bytes("\n\n".join(paragraphs).encode() + b"\n\xff")
    with pytest.raises(BadInput, match=r"a\.txt line 4000: is not UTF-8"):
        load(tmp_path / "a.txt")


def test_field_names_the_column_and_bytes_are_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"body": "pär", "text": "no"}])
    (document,) = load_source(source.model_copy(update={"field": "body"}), bpe()).train
    assert bpe().decode(document.ids) == "pär"
    assert document.text_bytes == 4


def test_rows_with_nothing_in_them_are_counted_and_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [ALPACA, ALPACA | {"output": " "}, ALPACA | {"output": ""}])
    documents = load(tmp_path / "a.jsonl", "alpaca")
    assert (len(documents.train), documents.skipped) == (1, 2)


@pytest.mark.parametrize(
    ("roles", "kept"),
    [("ua", "ua"), ("sua", "sua"), ("aua", "ua"), ("uau", "ua"), ("saauauu", "sua"), ("a", ""), ("u", ""), ("sa", "")],
)
def test_a_conversation_is_cut_to_what_begins_with_a_question_and_ends_with_a_response(
    roles: str, kept: str, tmp_path: Path
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    said = [{"role": names[role], "content": f"{role}{place}."} for place, role in enumerate(roles)]
    whole = [{"role": "user", "content": "u."}, {"role": "assistant", "content": "a."}]
    write(tmp_path / "a.jsonl", [{"messages": said}, {"messages": whole}])
    documents = load(tmp_path / "a.jsonl", "messages")
    assert documents.skipped == (not kept)
    if kept:
        text = " ".join(bpe().decode(document.ids) for document in documents.train)
        places = [f"{role}{place}." for place, role in enumerate(roles) if f"{role}{place}." in text]
        assert "".join(part[0] for part in places) == kept


BAD_ROWS: list[tuple[str, str, bytes, str]] = [
    ("a.jsonl", "text", b'{"text": "x"}\n{"text": \n', r"a\.jsonl line 2: is not JSON"),
    ("a.jsonl", "text", b'{"text": "x"}\n{"txt": "x"}\n', r"a\.jsonl line 2: has no field 'text' \(it has 'txt'\)"),
    ("a.jsonl", "text", b'\n{"text": 3}\n', r"a\.jsonl line 2: field 'text' is a int; it should be a string"),
    ("a.jsonl", "text", b'["x"]\n', r"a\.jsonl line 1: is a JSON list"),
    ("a.jsonl", "text", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl line 2: is not UTF-8"),
    ("a.jsonl", "text", b"\n\n", r"a\.jsonl: is empty"),
    ("a.jsonl", "text", b'{"text": " "}\n', r"has no row with any text"),
    ("a.txt", "text", b"\n\nx\xff", r"a\.txt line 3: is not UTF-8"),
    ("a.txt", "text", b"", r"a\.txt: is empty"),
    ("a.txt", "alpaca", b"hello", r"a\.txt: has no field 'instruction'"),
    ("a.json", "text", b'[{"text": "x"},\n{"text"}]', r"a\.json line 2: is not JSON"),
    ("a.json", "text", b'{"text":\n"x"}', r"a\.json line 1: is not JSON"),
    ("a.json", "text", b'"text"', r"a\.json: contains a single JSON str"),
    ("a.json", "text", b'[{"text": "x"}, {}]', r"a\.json row 2: has no field 'text' \(it has none\)"),
    ("a.tsv", "text", b"text\nx", r"a\.tsv: a data file ends in"),
    ("a.parquet.gz", "text", b"x", r"a\.parquet\.gz: a data file ends in"),
    ("a.parquet", "text", b"PAR1", r"a\.parquet: cannot be read as a parquet file"),
    ("a.csv", "text", b"text\nx,y", r"a\.csv line 2: has more fields than the first line"),
    ("a.csv", "text", b'text\n"x', r"a\.csv line 2: is not CSV \(unexpected end of data"),
    ("a.csv", "text", b"text\n\xe4", r"a\.csv line 2: is not UTF-8 text .*save it as UTF-8"),
    ("a.csv", "text", b"text\n", r"a\.csv: is empty"),
    ("a.csv", "text", b"\n \n", r"a\.csv: is empty"),
    ("a.csv", "text", b"\n\r\ntext\nx,y", r"a\.csv line 4: has more fields than the first line"),
    ("a.csv", "text", b"\ntext,n,text\nx,1,\n", r"a\.csv line 2: names the column 'text' twice"),
    ("a.csv", "text", b"body,n\nx,1", r"has no field 'text' \(it has 'body', 'n'\)$"),
    ("a.jsonl", "text", b'{"body": "x", "n": 1}', r"name the column of the text, field: body"),
    ("a.jsonl", "text", b'{"instruction": "x", "output": "y"}', r"give the source format: alpaca"),
    ("a.jsonl", "text", b'{"prompt": "x", "completion": "y"}', r"give the source format: messages"),
    ("a.jsonl", "alpaca", b'{"conversations": []}', r"give the source format: messages"),
    ("a.jsonl.zst", "text", b"plain", r"a\.jsonl\.zst: cannot be read"),
    ("a.jsonl", "messages", b'{"conversations": [{"from": "human"}]}', r"message 1 of 'conversations' should have"),
    ("a.jsonl", "messages", b'{"prompt": "x", "completion": 3}', r"'prompt, completion' should be a list of messages"),
    ("a.jsonl.xz", "text", b"plain", r"a\.jsonl\.xz: cannot be read"),
    ("a.jsonl.xz", "text", lzma.compress(b'{"text": "x"}\n' * 99)[:-9], r"a\.jsonl\.xz: cannot be read .*ended"),
    ("a.jsonl.gz", "text", GZIPPED[:-9], r"a\.jsonl\.gz: cannot be read .*ended"),
    ("a.jsonl", "alpaca", b'{"instruction": "x", "input": ""}\n', r"line 1: has no field 'output'"),
    (
        "a.jsonl",
        "alpaca",
        b'{"instruction": "x", "input": 3, "output": "y"}\n',
        r"line 1: field 'input' is a int",
    ),
    ("a.jsonl", "messages", b'{"messages": "hello"}\n', r"line 1: field 'messages' should be a list of messages"),
    ("a.jsonl", "messages", b'{"messages": [{"role": "user"}]}\n', r"line 1: message 1 of 'messages' should have"),
    ("a.jsonl", "messages", b'{"messages": []}\n', r"a\.jsonl has no row with a question and its answer"),
    (
        "a.jsonl",
        "messages",
        b'{"messages": [{"role": "User", "content": "x"}, {"role": "Assistant", "content": "y"}]}\n',
        r"a\.jsonl has no row with a question and its answer, which are messages of the roles user and assistant",
    ),
]


@pytest.mark.parametrize(("name", "format", "content", "message"), BAD_ROWS)
def test_bad_rows_are_named_with_file_and_line(
    name: str, format: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load(tmp_path / name, format)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone\.jsonl: there is no such file"):
        load(tmp_path / "gone.jsonl")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(BadInput, match=r"folder\.txt: is a folder without a data file"):
        load(tmp_path / "folder.txt")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: (path / "b.jsonl").symlink_to("gone.jsonl"), r"b\.jsonl: is a link to a file that is not there"),
        (lambda path: os.mkfifo(path / "b.jsonl"), r"b\.jsonl: is a pipe, not a file"),
        (lambda path: (path / "b").symlink_to(path.parent), r"b: is a link to a folder, and links to folders are not"),
        (lambda path: (path / "B.JSONL").touch(), r"B\.JSONL: cannot be read; a data file ends in \.jsonl"),
        (lambda path: (path / "b.jsonl.bz2").touch(), r"b\.jsonl\.bz2: cannot be read; a data file ends in"),
        (lambda path: (path / "b.arrow").touch(), r"b\.arrow: cannot be read; .*; convert it, or move it elsewhere"),
    ],
)
def test_data_of_a_folder_that_would_be_missing_in_silence_is_named(
    make: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one apple"}\n')
    make(folder)
    with pytest.raises(BadInput, match=says):
        load(folder)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "one apple"}\n')
    real = os.scandir

    def scandir(path: Any) -> Any:  # root may list a folder of any mode
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BadInput, match=r"closed: cannot be read \(Permission denied\)"):
        load(tmp_path)


def test_messages_that_the_chat_template_refuses_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TALK}])
    with pytest.raises(BadInput, match=r"line 1: the chat template refuses these messages \(no system"):
        load(tmp_path / "a.jsonl", "messages", bpe("{{ raise_exception('no system role') }}"))
    with pytest.raises(BadInput, match="line 1: with this chat template, its responses cannot be told apart"):
        load(tmp_path / "a.jsonl", "messages", bpe("{{ messages | length }}"))


# --- the hub


def test_hub_rows_are_read_and_what_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(id: str, name: str | None, split: str, revision: str | None) -> datasets.Dataset:
        if split == "gone":
            raise ValueError('Unknown split "gone"')
        return datasets.Dataset.from_list(
            [{"text": "a pear"}, {"text": "an apple"}] if split == "train" else [{"no": 1}]
        )

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert len(load_source(HubSource(id="some/text"), bpe()).train) == 2
    with pytest.raises(BadInput, match="hub data set some/text, split test, row 0: has no field 'text'"):
        load_source(HubSource(id="some/text", split="test"), bpe())
    with pytest.raises(BadInput, match=r"hub data set some/text, split gone: cannot be loaded \(Unknown split"):
        load_source(HubSource(id="some/text", split="gone"), bpe())


# --- responses


def test_only_responses_and_the_marks_that_end_them_are_learned(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TALK}])
    tokenizer = bpe()
    (document,) = load(tmp_path / "a.jsonl", "messages", tokenizer).train
    assert tokenizer.decode(document.ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert learned(document, tokenizer) == "A fruit.<|im_end|>Another fruit, I think.<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]},
        {"conversations": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]},
        {"prompt": "Who?", "completion": "I."},
        {"prompt": [{"role": "user", "content": "Who?"}], "completion": [{"role": "assistant", "content": "I."}]},
    ],
    ids=["ShareGPT", "conversations", "prompt and completion", "of messages"],
)
def test_chats_of_other_forms_are_the_same_documents(row: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row])
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    write(tmp_path / "b.jsonl", [{"messages": messages}])
    (document,), (same,) = (load(tmp_path / name, "messages").train for name in ("a.jsonl", "b.jsonl"))
    assert (document.ids.tolist(), document.loss.tolist()) == (same.ids.tolist(), same.loss.tolist())
    assert learned(document, bpe()) == "I.<|im_end|>"


@pytest.mark.parametrize("tools", [[{"name": "pick"}], '[{"name": "pick"}]'], ids=["a list", "JSON text"])
def test_the_tools_of_a_chat_are_shown_where_its_template_does(tools: object, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TALK, "tools": tools}])
    tokenizer = bpe("{% for tool in tools or [] %}{{ tool['name'] }}: {% endfor %}" + CHATML)
    documents = load(tmp_path / "a.jsonl", "messages", tokenizer)
    assert tokenizer.decode(documents.train[0].ids).startswith("pick: <|im_start|>system")
    assert learned(documents.train[0], tokenizer) == "A fruit.<|im_end|>Another fruit, I think.<|im_end|>"
    assert not documents.hides_tools
    assert load(tmp_path / "a.jsonl", "messages").hides_tools


@pytest.mark.parametrize("tools", [{"name": "pick"}, "pick", ["pick"], 3])
def test_tools_that_are_no_list_of_tools_are_refused(tools: object, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TALK, "tools": tools}])
    with pytest.raises(BadInput, match=r"a\.jsonl line 1: field 'tools' should be a list of tools"):
        load(tmp_path / "a.jsonl", "messages")


@pytest.mark.parametrize("tools", [None, [], ""])
def test_a_chat_without_tools_is_as_one_that_has_no_column_for_them(tools: object, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TALK, "tools": tools}])
    assert not load(tmp_path / "a.jsonl", "messages").hides_tools


def test_roles_that_the_chat_template_does_not_show_are_told(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Two?"}, {"role": "tool", "content": 'say "2"'}]
    write(tmp_path / "a.jsonl", [{"messages": [*talk, {"role": "assistant", "content": "It is 2."}]}])
    hides = CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}")
    escapes = CHATML.replace("{{ message['content'] }}", "{{ message['content'] | replace('\"', '&quot;') }}")
    for template, hidden in ((hides, {"tool"}), (escapes, set()), (CHATML, set())):
        assert load(tmp_path / "a.jsonl", "messages", bpe(template)).hidden_roles == hidden


@pytest.mark.parametrize("content", ["", None])
def test_a_call_of_a_tool_is_learned_only_where_the_template_shows_it(content: str | None, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "pick"}}]}
    talk = [{"role": "user", "content": "Two?"}, call, {"role": "tool", "content": "2"}]
    write(tmp_path / "a.jsonl", [{"messages": [*talk, {"role": "assistant", "content": "It is 2."}]}])
    shown = CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}{{ message.tool_calls or '' }}")
    for template, learns in ((CHATML, ""), (shown, "[{'function': {'name': 'pick'}}]<|im_end|>")):
        (document,) = load(tmp_path / "a.jsonl", "messages", bpe(template)).train
        assert learned(document, bpe()) == learns + "It is 2.<|im_end|>"


def test_a_turn_that_later_turns_rewrite_is_context_only(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TALK}])
    tokenizer = bpe(REASONING)
    (document,) = load(tmp_path / "a.jsonl", "messages", tokenizer).train
    assert learned(document, tokenizer) == "<think>\n</think>\nAnother fruit, I think.<|im_end|>"


def test_alpaca_rows_follow_the_chat_template(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [ALPACA])
    tokenizer = bpe()
    (document,) = load(tmp_path / "a.jsonl", "alpaca", tokenizer).train
    assert tokenizer.decode(document.ids) == (
        "<|im_start|>user\nName a fruit.\n\nIt is red.<|im_end|>\n<|im_start|>assistant\nAn apple.<|im_end|>\n"
    )
    assert learned(document, tokenizer) == "An apple.<|im_end|>"


def test_without_a_chat_template_rows_follow_alpacas_layout(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [ALPACA])
    tokenizer = bpe(chat_template=None)
    (document,) = load(tmp_path / "a.jsonl", "alpaca", tokenizer).train
    assert tokenizer.decode(document.ids).endswith(
        "\n\n### Instruction:\nName a fruit.\n\n### Input:\nIt is red.\n\n### Response:\nAn apple.<|im_end|>"
    )
    assert learned(document, tokenizer) == "An apple.<|im_end|>"


# --- held out


def test_held_out_documents_are_the_same_ones_and_never_trained_on(tmp_path: Path) -> None:
    rows = [{"text": f"apple {i % 50}"} for i in range(100)]  # each text twice
    write(tmp_path / "a.jsonl", rows)
    write(tmp_path / "b.jsonl", rows[::-1])
    first, again = (load(tmp_path / name, held_out=0.2) for name in ("a.jsonl", "b.jsonl"))
    train, held_out = ({tuple(d.ids) for d in part} for part in (first.train, first.held_out))
    assert not train & held_out
    assert len(first.train) + len(first.held_out) == 100
    assert 10 <= len(first.held_out) <= 30
    assert held_out == {tuple(d.ids) for d in again.held_out}


def test_at_least_one_document_is_held_out_and_one_is_left(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "an apple"}, {"text": "a pear"}])
    documents = load(tmp_path / "a.jsonl", held_out=0.001)
    assert (len(documents.train), len(documents.held_out)) == (1, 1)
    write(tmp_path / "one.jsonl", [{"text": "an apple"}])
    with pytest.raises(BadInput, match=r"one\.jsonl has too few documents"):
        load(tmp_path / "one.jsonl", held_out=0.1)


def test_the_end_of_the_only_text_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"Line {i} of an only text.\n" + "\n" * (i % 4 == 3) for i in range(40))
    (tmp_path / "a.txt").write_text(text)
    write(tmp_path / "a.jsonl", [{"text": text}])
    read: dict[float, list[str]] = {}
    for held_out in (0.1, 0.3):
        for name in ("a.txt", "a.jsonl"):
            documents = load(tmp_path / name, held_out=held_out)
            (train,), (end,) = ([bpe().decode(d.ids) for d in part] for part in (documents.train, documents.held_out))
            assert train.strip() + "\n\n" + end.strip() == text.strip()  # cut at a blank line
            assert held_out - 0.01 < len(end) / len(text) < held_out * 2
            assert read.setdefault(held_out, [train, end])[0].strip() == train.strip()
    assert read[0.3][1].endswith(read[0.1][1])  # who holds out more trains on nothing that others hold out
    assert len(load(tmp_path / "a.txt").train) == 1


def test_a_validation_file_is_held_out_and_what_it_repeats_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "an apple"}, {"text": "a pear"}])
    write(tmp_path / "v.jsonl", [{"text": "a pear"}, {"text": "a plum"}])
    documents = load(tmp_path / "a.jsonl", validation=str(tmp_path / "v.jsonl"))
    texts = [[bpe().decode(d.ids) for d in part] for part in (documents.train, documents.held_out)]
    assert texts == [["an apple"], ["a pear", "a plum"]]


# --- the documentation that every Python carries


@functools.cache
def pydoc(questions: bool) -> list[DataRow]:
    return list(pydoc_rows(questions=questions))


def test_pydoc_is_enough_to_train_on_and_no_two_topics_share_a_paragraph() -> None:
    rows = pydoc(questions=False)
    assert sum(len(row.value["text"]) for row in rows) > 500_000
    assert len({row.key for row in rows}) == len(rows) > 200
    topics = [row.value["text"] for row in rows if str(row.key).startswith("topic")]
    paragraphs = [paragraph for text in topics for paragraph in set(text.split("\n\n")) if len(paragraph) > 100]
    assert len(paragraphs) == len(set(paragraphs)) > 500


def test_pydoc_as_questions_holds_out_the_topics_it_holds_out_as_text() -> None:
    text_keys, question_keys = ({str(row.key) for row in pydoc(questions=q)} for q in (False, True))
    held_out = [held_out_keys(keys, 0.1, seed=0) for keys in (text_keys, question_keys)]
    assert not held_out[0] & (question_keys - held_out[1])
    assert len(held_out[1]) > 10


def test_pydoc_questions_are_instruction_rows() -> None:
    conversations = [row.value["messages"] for row in pydoc(questions=True)]
    assert all([m["role"] for m in messages] == ["user", "assistant"] for messages in conversations)
    assert conversations[0][0]["content"].startswith("Explain the Python topic: ")
    assert len(conversations) > 500
    assert all(len(messages[1]["content"]) > 50 for messages in conversations)
