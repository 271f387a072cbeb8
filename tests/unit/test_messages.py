"""Messages of a chat whose content is in parts, and chats for a tokenizer that cannot end them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from liger_convert.config.sources import FileSource
from liger_convert.data.documents import Document, Documents, load_source
from liger_convert.utils.errors import BadInput


def load(path: Path, *contents: Any) -> Document:
    """The document of a chat, which is written to `path`, with these contents of the messages of user and assistant."""
    messages = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), contents)]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (document,) = load_source(FileSource(path=str(path), format="messages"), tiny_tokenizer()).train
    return document


def test_a_content_of_several_texts_is_read_as_one(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?", "image": None}]
    found = load(tmp_path / "a.jsonl", parts, [{"type": "text", "text": "I."}])
    plain = load(tmp_path / "b.jsonl", "Who?", "I.")
    assert (found.ids.tolist(), found.loss.tolist()) == (plain.ids.tolist(), plain.loss.tolist())


@pytest.mark.parametrize("part", [{"type": "image", "url": "x.png"}, {"type": "text", "text": None}, "Who?", None])
def test_a_content_that_is_not_only_text_is_refused(tmp_path: Path, part: object) -> None:
    with pytest.raises(BadInput, match=r"a\.jsonl line 1: message 1 of 'messages' should have a role and a content"):
        load(tmp_path / "a.jsonl", [{"type": "text", "text": "Who?"}, part], "I.")


def test_responses_for_a_tokenizer_without_a_token_that_ends_them_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"instruction": "Who?", "output": "I."}) + "\n")
    tokenizer, source = tiny_tokenizer(), FileSource(path=str(tmp_path / "a.jsonl"), format="alpaca")
    tokenizer.eos_token = tokenizer.chat_template = None
    with pytest.raises(BadInput, match="the tokenizer has no token that ends one; give it an eos_token or a chat"):
        load_source(source, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    assert load_source(source, tokenizer).train


# --- a system message beside the chat, and weights

WHO = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
SAID = {"role": "system", "content": "Be brief."}


def read(path: Path, row: dict[str, Any], **fields: Any) -> Documents:
    """What a source of this one row has."""
    path.write_text(json.dumps(row) + "\n")
    return load_source(FileSource(path=str(path), **{"format": "messages"} | fields), tiny_tokenizer())


def learned(document: Document) -> str:
    """The text of the tokens that count in a loss on responses."""
    return str(tiny_tokenizer().decode(document.ids[document.loss]))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": WHO, "system": "Be brief."},
        {"messages": [SAID, *WHO], "system": " Be brief. "},
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}], "system": "Be brief."},
        {"prompt": "Who?", "completion": "I.", "system_prompt": "Be brief."},
        {"instruction": "Who?", "output": "I.", "system": "Be brief."},
    ],
    ids=["messages", "in both places", "conversations", "prompt", "alpaca"],
)
def test_a_system_message_in_a_column_beside_the_chat_begins_it(row: dict[str, Any], tmp_path: Path) -> None:
    form = "alpaca" if "output" in row else "messages"
    (found,) = read(tmp_path / "a.jsonl", row, format=form).train
    (asked,) = read(tmp_path / "b.jsonl", {"messages": [SAID, *WHO]}).train
    assert (found.ids.tolist(), found.loss.tolist()) == (asked.ids.tolist(), asked.loss.tolist())


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_an_empty_column_system_adds_no_message(nothing: str | None, tmp_path: Path) -> None:
    (found,) = read(tmp_path / "a.jsonl", {"messages": WHO, "system": nothing}).train
    (plain,) = read(tmp_path / "b.jsonl", {"messages": WHO}).train
    assert found.ids.tolist() == plain.ids.tolist()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"messages": [SAID, *WHO], "system": "Be long."},
            "has a system message and another one in the field 'system'",
        ),
        ({"messages": WHO, "system": ["Be brief."]}, "field 'system' is a list; it should be a string"),
        ({"messages": [WHO[0], WHO[1] | {"weight": 0.5}]}, "message 2 of 'messages' should have a weight of 0"),
        ({"messages": [WHO[0], WHO[1] | {"weight": "0"}]}, "message 2 of 'messages' should have a weight of 0"),
    ],
    ids=["two that differ", "no text", "a part of a weight", "a weight that is a text"],
)
def test_a_system_message_or_a_weight_that_cannot_be_followed_is_refused(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=f"line 1: {says}"):
        read(tmp_path / "a.jsonl", row)


def test_a_response_with_a_weight_of_0_is_read_but_does_not_count(tmp_path: Path) -> None:
    again = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "weight": 1}]
    (found,) = read(tmp_path / "a.jsonl", {"messages": [WHO[0], WHO[1] | {"weight": 0}, *again]}).train
    (plain,) = read(tmp_path / "b.jsonl", {"messages": [*WHO, *again]}).train
    assert found.ids.tolist() == plain.ids.tolist()
    assert learned(plain) == "I.</s>So.</s>", "or nothing is tested"
    assert learned(found) == "So.</s>"


def test_a_chat_of_which_no_response_counts_is_left_out_and_counted(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I.", "weight": 0}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"conversations": c}) + "\n" for c in (said, said[:1])))
    with pytest.raises(BadInput, match="has no row with a question and its answer"):
        load_source(FileSource(path=str(tmp_path / "a.jsonl"), format="messages"), tiny_tokenizer())


def test_a_completion_that_is_labelled_as_bad_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "Who?", "completion": said, "label": good} for said, good in (("I.", True), ("You.", False))]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"messages": WHO, "label": False}])
    )
    found = load_source(FileSource(path=str(tmp_path / "a.jsonl"), format="messages"), tiny_tokenizer())
    assert ([learned(document) for document in found.train], found.skipped) == (["I.</s>"] * 2, 1)


def test_turns_before_a_question_of_alpaca_are_refused(tmp_path: Path) -> None:
    row = {"instruction": "Why?", "output": "So.", "history": []}
    assert read(tmp_path / "a.jsonl", row, format="alpaca").train
    with pytest.raises(BadInput, match="line 1: has turns in the field 'history', which is not read"):
        read(tmp_path / "a.jsonl", row | {"history": [["Who?", "I."]]}, format="alpaca")


@pytest.mark.parametrize(("weight", "rows"), [(0, 1), (0.5, 1), ("0", 1), (1, 0), (1.0, 0), (None, 0)])
def test_rows_with_a_weight_of_their_own_are_counted(weight: Any, rows: int, tmp_path: Path) -> None:
    for name, row in {"text": {"text": "So."}, "messages": {"messages": WHO}}.items():
        assert read(tmp_path / "a.jsonl", row | {"weight": weight}, format=name).weighted == rows


# --- calls of tools

# as Qwen2.5's, which writes arguments as JSON, and as DeepSeek's, which takes a text
AS_JSON, AS_TEXT = ("{{ call.function.arguments | tojson }}", "{{ 'with ' + call.function.arguments }}")


def called(path: Path, arguments: str) -> str:
    """The text of the only chat in the file `path`, with a template that shows tools and the `arguments` of calls."""
    shown = "{{ m['content'] }}{% for call in m.tool_calls or [] %}" + arguments + "{% endfor %}"
    tokenizer = tiny_tokenizer()
    template = CHAT_TEMPLATE.replace("{{ m['content'] }}", shown)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + template
    documents = load_source(FileSource(path=str(path), format="messages"), tokenizer)
    return str(tokenizer.decode(documents.train[0].ids))


def calling(arguments: Any, tool: dict[str, Any]) -> dict[str, Any]:
    """A row with one call of a tool."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}
    answer = {"role": "assistant", "content": "I."}
    return {"messages": [{"role": "user", "content": "Who?"}, call, answer], "tools": [tool]}


@pytest.mark.parametrize(
    ("arguments", "template", "shown"),
    [
        ('{"a": 1}', AS_JSON, '{"a": 1}'),
        ({"a": 1}, AS_JSON, '{"a": 1}'),
        ("all", AS_JSON, '"all"'),
        ('{"a": 1}', AS_TEXT, 'with {"a": 1}'),
    ],
    ids=["text", "an object", "no JSON", "a template for texts"],
)
def test_arguments_of_a_call_that_are_json_text_are_written_as_json(
    arguments: Any, template: str, shown: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(calling(arguments, {"name": "pick"})) + "\n")
    assert f"<s>assistant: {shown}</s>" in called(tmp_path / "a.jsonl", template)


def test_nulls_that_a_table_adds_to_tools_and_their_calls_are_not_shown(tmp_path: Path) -> None:
    rows = [calling({"a": 1}, {"a": {"type": "int"}}), calling({"b": 2}, {"b": {"type": "int"}})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "null" in json.dumps(pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()), "or nothing is tested"
    assert called(tmp_path / "a.parquet", AS_JSON) == called(tmp_path / "a.jsonl", AS_JSON)
