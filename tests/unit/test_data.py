"""Rows become documents with the right tokens learned, and documents become rows that keep them apart."""

from __future__ import annotations

import functools
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from liger_convert.config.sources import FileSource, HubSource
from liger_convert.data.documents import Document, held_out_keys, load_source
from liger_convert.data.packed_rows import IGNORED, RANDOM_COPIES, collate, pack
from liger_convert.data.row_files import Row, file_rows
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


def test_tables_and_lines_named_json_give_the_same_documents(tmp_path: Path) -> None:
    lines = b'{"n": 1, "text": "one, apple"}\r\n{"n": 2, "text": null}\n{"n": 3, "text": "a\\np\xc3\xa4r"}\n'
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines.splitlines()])
    (tmp_path / "a.json").write_bytes(lines)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfn,text\r\n1,"one, apple"\r\n2,\r\n3,"a\np\xc3\xa4r"\r\n')
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
    ("a.json", "text", b'"text"', r"a\.json: holds one JSON str"),
    ("a.json", "text", b'[{"text": "x"}, {}]', r"a\.json row 2: has no field 'text' \(it has none\)"),
    ("a.tsv", "text", b"text\nx", r"a\.tsv: a data file ends in"),
    ("a.parquet.gz", "text", b"x", r"a\.parquet\.gz: a data file ends in"),
    ("a.parquet", "text", b"PAR1", r"a\.parquet: cannot be read as a parquet file"),
    ("a.csv", "text", b"text\nx,y", r"a\.csv line 2: has more fields than the first line"),
    ("a.csv", "text", b'text\n"x', r"a\.csv line 2: is not CSV \(unexpected end of data"),
    ("a.csv", "text", b"text\n\xe4", r"a\.csv line 2: is not UTF-8 text .*save it as UTF-8"),
    ("a.csv", "text", b"text\n", r"a\.csv: is empty"),
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
    ("a.jsonl", "messages", b'{"messages": []}\n', r"line 1: 'messages' should begin with what is asked"),
    ("a.jsonl", "messages", b'{"messages": [{"role": "user", "content": "x"}]}\n', r"line 1: .* end with an assistant"),
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


def test_messages_that_the_chat_template_refuses_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TALK}])
    with pytest.raises(BadInput, match=r"line 1: the chat template refuses these messages \(no system"):
        load(tmp_path / "a.jsonl", "messages", bpe("{{ raise_exception('no system role') }}"))
    with pytest.raises(BadInput, match="line 1: the chat template does not let its responses be told"):
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


def test_a_validation_file_is_held_out_and_what_it_repeats_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "an apple"}, {"text": "a pear"}])
    write(tmp_path / "v.jsonl", [{"text": "a pear"}, {"text": "a plum"}])
    documents = load(tmp_path / "a.jsonl", validation=str(tmp_path / "v.jsonl"))
    texts = [[bpe().decode(d.ids) for d in part] for part in (documents.train, documents.held_out)]
    assert texts == [["an apple"], ["a pear", "a plum"]]


# --- the documentation that every Python carries


@functools.cache
def pydoc(questions: bool) -> list[Row]:
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
    assert all(len(messages[1]["content"]) > 100 for messages in conversations)


# --- packing


def documents(*sizes: int) -> list[Document]:
    """Documents whose tokens are all different, so that each token tells where it comes from."""
    starts = np.cumsum([0, *sizes[:-1]])
    ids = [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes)]
    return [Document(i, np.arange(len(i)) % 3 > 0, len(i)) for i in ids]


def segments(item: dict[str, Any]) -> list[list[int]]:
    starts = [i for i, position in enumerate(item["position_ids"].tolist()) if position == 0]
    return [item["input_ids"].tolist()[a:b] for a, b in zip(starts, [*starts[1:], None])]


def test_rows_are_full_and_lose_only_the_end_of_the_last_document() -> None:
    docs = documents(5, 11, 3, 20, 9)
    packed = pack(docs, seq_len=8, seed=1)
    assert len(packed) == 48 // 8
    seen = [token for item in packed for token in item["input_ids"].tolist()]
    assert sorted(seen) == list(range(48))
    order = np.random.default_rng((1, 0)).permutation(5)
    assert seen == [token for i in order for token in docs[i].ids.tolist()]
    assert len(pack(docs, seq_len=7, seed=1)) == 6


def test_a_segment_is_one_document_whose_first_token_is_no_target() -> None:
    docs = documents(5, 11, 3, 20, 9)
    of = np.repeat(np.arange(5), [5, 11, 3, 20, 9])
    for item in pack(docs, seq_len=8, tokens=400):
        for segment in segments(item):
            assert len(set(of[segment])) == 1
            assert segment == list(range(segment[0], segment[0] + len(segment)))
        first = item["position_ids"] == 0
        assert (item["labels"][first] == IGNORED).all()
        assert (item["labels"][~first] == item["input_ids"][~first]).all()


@pytest.mark.parametrize("responses_only", [False, True])
def test_a_joined_row_is_one_segment_of_the_same_tokens(responses_only: bool) -> None:
    docs = documents(5, 11, 3, 20, 9)
    learned_token = np.concatenate([d.loss for d in docs]) | (not responses_only)
    options = {"seq_len": 8, "tokens": 400, "responses_only": responses_only}
    apart, joined = pack(docs, **options), pack(docs, **options, concat_documents=True)  # type: ignore[arg-type]
    for before, item in zip(apart, joined, strict=True):
        assert item["input_ids"].equal(before["input_ids"])
        assert item["position_ids"].tolist() == list(range(8))
        learned = torch.from_numpy(learned_token[item["input_ids"]]) & (item["position_ids"] > 0)
        assert item["labels"].equal(torch.where(learned, item["input_ids"], IGNORED))


@pytest.mark.parametrize("concat_documents", [False, True])
def test_micro_batches_of_shorter_rows_have_the_same_tokens_in_pieces(concat_documents: bool) -> None:
    docs, batch_size = documents(5, 11, 3, 20, 9), 3
    options: dict[str, Any] = {"seq_len": 16, "tokens": 16 * 3 * 200, "concat_documents": concat_documents}
    plain, packed = (
        pack(docs, **options),
        pack(docs, **options, mixed_seq_lens=[(8, 0.2), (4, 0.3)], batch_size=batch_size),
    )
    lengths = []
    for at in range(0, len(packed), batch_size):
        batch = collate([packed[i] for i in range(at, at + batch_size)])
        rows, length = batch["input_ids"].shape
        lengths.append(length)
        assert rows * length == 16 * batch_size
        whole = collate([plain[i] for i in range(at, at + batch_size)])
        assert batch["input_ids"].flatten().equal(whole["input_ids"].flatten())
        assert (batch["position_ids"][:, 0] == 0).all()
        if concat_documents:
            assert batch["position_ids"].equal(torch.arange(length).expand(rows, -1))
        first = batch["position_ids"] == 0
        assert batch["labels"].equal(torch.where(first, IGNORED, batch["input_ids"]))
    shares = [np.mean(np.equal(lengths, length)) for length in (16, 8, 4)]
    np.testing.assert_allclose(shares, [0.5, 0.2, 0.3], atol=0.1)
    for i in (0, 7):
        assert all(x.equal(plain[i][name]) for name, x in packed.whole(i).items())


def test_with_responses_only_the_labels_follow_the_loss_mask() -> None:
    docs = documents(5, 11, 3, 20, 9)
    learned_token = np.concatenate([d.loss for d in docs])
    for item in pack(docs, seq_len=8, tokens=400, responses_only=True):
        labelled = (item["labels"] != IGNORED).numpy()
        assert (labelled == learned_token[item["input_ids"]] & (item["position_ids"].numpy() > 0)).all()


def test_a_budget_beyond_the_data_repeats_it_in_a_new_order() -> None:
    packed = pack(documents(4, 4, 4, 4, 4, 4), seq_len=4, tokens=4 * 15)
    rows = [item["input_ids"].tolist() for item in packed]
    passes = [rows[:6], rows[6:12]]
    assert packed.epochs == 2.5
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]


def test_packing_is_drawn_from_the_seed_and_cut_to_the_budget() -> None:
    docs = documents(*range(3, 40))
    one, same, other = (pack(docs, 16, tokens=320, seed=seed) for seed in (3, 3, 4))
    assert len(one) == 20
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(one, same))
    assert not all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(one, other))


def stretches(item: dict[str, Any], plain: dict[str, Any]) -> tuple[slice, slice, bool]:
    """The two places of the copy in a row that repeats itself, given the row without, and whether it is random text.

    The tokens of `documents` are all different, so what stands twice is the copy, up to chance in random text."""
    ids, before = item["input_ids"].numpy(), plain["input_ids"].numpy()
    changed = np.flatnonzero(ids != before)
    lags = np.subtract.outer(changed, np.arange(len(ids)))
    twice = (ids[changed][:, None] == ids) & (lags > 0)
    lag = np.bincount(lags[twice]).argmax()
    at = changed[changed >= lag]
    at = at[ids[at] == ids[at - lag]]
    return slice(at[0] - lag, at[-1] + 1 - lag), slice(at[0], at[-1] + 1), bool((changed < at[0]).any())


REPEATS: dict[str, Any] = {"tokens": 64 * 600, "seed": 2}


@functools.cache
def repeated() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """600 rows of which 0.4 repeat themselves, and the same rows as they were."""
    docs = documents(*[37, 101, 5, 64, 300] * 100)
    return list(pack(docs, 64, copy_fraction=0.4, **REPEATS)), list(pack(docs, 64, **REPEATS))


def changed_rows() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(item, plain) for item, plain in zip(*repeated()) if not item["input_ids"].equal(plain["input_ids"])]


def test_as_many_rows_repeat_themselves_as_are_asked_for_and_the_others_stay() -> None:
    share, four_sigma = len(changed_rows()) / 600, 4 * (0.4 * 0.6 / 600) ** 0.5
    assert abs(share - 0.4) < four_sigma
    for item, plain in zip(*repeated()):
        if item["input_ids"].equal(plain["input_ids"]):
            assert all(item[name].equal(plain[name]) for name in item)


def test_a_copy_equals_its_original_and_nothing_else_of_the_row_is_touched() -> None:
    for item, plain in changed_rows():
        original, copy, random = stretches(item, plain)
        ids, before = item["input_ids"].numpy(), plain["input_ids"].numpy()
        assert (ids[original] == ids[copy]).all()
        assert original.stop <= copy.start
        untouched = np.ones(64, bool)
        untouched[copy] = False
        untouched[original] = not random
        assert (ids[untouched] == before[untouched]).all()


def test_copies_are_of_all_lengths_in_all_places_and_some_are_random_text() -> None:
    found = [stretches(*pair) for pair in changed_rows()]
    lengths = [copy.stop - copy.start for _, copy, _ in found]
    assert (min(lengths), max(lengths)) == (64 // 4, 64 // 2 - 64 // 32)
    assert min(original.start for original, _, _ in found) == 0
    assert max(copy.stop for _, copy, _ in found) == 64
    gaps = [copy.start - original.stop for original, copy, _ in found]
    assert min(gaps) == 0
    assert max(gaps) > 64 // 4
    share, four_sigma = np.mean([random for _, _, random in found]), 4 * (0.3 * 0.7 / len(found)) ** 0.5
    assert abs(share - RANDOM_COPIES) < four_sigma


def test_a_row_that_repeats_itself_is_one_document_learned_throughout() -> None:
    for item, _ in changed_rows():
        assert item["position_ids"].tolist() == list(range(64))
        assert item["labels"][0] == IGNORED
        assert item["labels"][1:].equal(item["input_ids"][1:])


def test_what_repeats_depends_on_the_seed_and_the_row_alone() -> None:
    docs, (rows, _) = documents(*[37, 101, 5, 64, 300] * 100), repeated()
    again = pack(docs, 64, copy_fraction=0.4, **REPEATS)
    assert all(again[i]["input_ids"].equal(rows[i]["input_ids"]) for i in (599, 3, 77))
    shorter = pack(docs, 64, copy_fraction=0.4, **REPEATS | {"tokens": 64 * 20})
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(shorter, rows))
    other = pack(docs, 64, copy_fraction=0.4, **REPEATS | {"seed": 3})
    starts = [[bool((item["position_ids"] == torch.arange(64)).all()) for item in packed] for packed in (rows, other)]
    assert starts[0] != starts[1]


@pytest.mark.parametrize("seq_len", [2, 3, 5, 31, 130, 1024])
def test_rows_of_any_length_can_repeat_themselves(seq_len: int) -> None:
    for item in pack(documents(50, 3000), seq_len, copy_fraction=0.999):
        ids = item["input_ids"].tolist()
        assert len(set(ids)) < seq_len


@pytest.mark.parametrize(("sizes", "tokens"), [((3, 4), None), ((30, 40), 7), ((), 100)])
def test_data_that_fills_no_row_is_refused(sizes: tuple[int, ...], tokens: int | None) -> None:
    with pytest.raises(BadInput, match="do not fill one row of 8"):
        pack(documents(*sizes) if sizes else [], 8, tokens)


def test_collate_stacks_rows() -> None:
    packed = pack(documents(50), 8)
    batch = collate([packed[0], packed[1]])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (2, 8),
        "position_ids": (2, 8),
        "labels": (2, 8),
    }
    with pytest.raises(IndexError):
        packed[len(packed)]
