"""Turns rows of a source into documents: token ids with a loss mask. `packed_rows` makes training rows of them.

Shapes: N tokens of a document, T tokens of each document that the base wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from liger_convert.config.sources import AnySource, PydocSource, TeacherSource
from liger_convert.data.row_files import DataRow, document_end
from liger_convert.data.sources import reference_rows, rows
from liger_convert.io import templates
from liger_convert.io.inputs import parse_json
from liger_convert.io.tokenizer import check_ids, text_prefix
from liger_convert.utils.errors import BadInput, refusing
from liger_convert.utils.progress import Report

# Stanford Alpaca's prompt format, for tokenizers without a chat template.
ALPACA_TEMPLATE = (
    "{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the request.' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '\n\n### Response:\n' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}{{ '\n\n### Instruction:\n' + message['content'] }}"
    "{% else %}{{ '\n\n' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
)

END = "the end of the only text"  # its key, where it is held out

CHATS = ("messages", "conversations")  # columns that may hold a conversation
SYSTEM = ("system", "system_prompt")  # columns that may hold its system message
PAIR = {"prompt", "completion"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenized document.

    ids: int32 [N], the token ids. loss: bool [N], the tokens that count in a stage with `responses_only`; all of them
    in plain text. text_bytes: size of the text in UTF-8, for per-byte metrics. begin: how many tokens `ids` begins with
    that the tokenizer puts before every text, such as its BOS token.
    """

    ids: np.ndarray
    loss: np.ndarray
    text_bytes: int
    begin: int = 0


@dataclass(frozen=True)
class Documents:
    """The documents of a source: those to train on, those held out, the number of rows skipped as empty, and whether
    its rows have tools that the chat template does not show. hidden_roles: the roles whose messages it does not show.
    weighted: the number of rows with a `weight` of their own, which is not read.
    """

    train: list[Document]
    held_out: list[Document]
    skipped: int
    hides_tools: bool = False
    hidden_roles: frozenset[str] = frozenset()
    weighted: int = 0


@dataclass(frozen=True, slots=True)
class _Text:
    """A text before tokenization.

    where: the name of its row, for error messages. spans: the character ranges that count in the loss; None for all.
    key: texts with the same key are held out together. tools: whether its row has tools for the chat template.
    hidden: roles of messages that the text does not show. weighted: whether its row has a `weight` of its own.
    """

    where: str
    text: str
    spans: list[tuple[int, int]] | None
    key: str
    tools: bool = False
    hidden: frozenset[str] = frozenset()
    weighted: bool = False


@dataclass
class _Notes:
    """What is noted of the rows that are read: as in Documents, and whether any has tools."""

    skipped: int = 0
    tools: bool = False
    hidden: frozenset[str] = frozenset()
    weighted: int = 0


def load_source(
    source: AnySource, tokenizer: Any, *, seed: int = 0, written: Path | None = None, progress: Report | None = None
) -> Documents:
    """Tokenizes all documents of `source` and separates the held-out ones.

    The held-out documents are those of `source.validation`. Without one, they are those whose hash of `seed` and key is
    below `source.held_out`, at least one if that is not 0; they are the same in every run. No text is in both parts,
    not even with other spaces and line ends. Of a source with a single text, such as a short .txt, the end of that text
    is held out.

    Plain text is tokenized with the tokenizer's own special tokens. Chat rows go through its chat template, or Alpaca's
    format if it has none, and do not depend on the day; the loss counts the assistant's tokens, up to and including the
    end-of-turn marker. Text that the base wrote is read from the file `written`, see `teacher.write`. Its first
    documents are held out, and equal texts are not trained on.

    Raises BadInput, naming file and line, for a row that cannot be used. Also raises it for a tokenizer without a fast
    version, and if no documents are left for training.
    """
    if not tokenizer.is_fast:
        raise BadInput("the tokenizer has no fast version (tokenizer.json), which locating responses in a chat needs")
    notes = _Notes()
    if isinstance(source, TeacherSource):
        assert written is not None
        documents = _read(source, written, tokenizer)
        held_out = documents[: source.held_out_documents]
    else:
        documents, notes = _documents(source, _parted(source, rows(source)), tokenizer, progress)
        if getattr(source, "validation", None):
            held_out, more = _documents(source, rows(source, validation=True), tokenizer, progress)
            notes.skipped += more.skipped
        else:
            keys = {key for key, _ in documents}
            drawn = {END} if END in keys else held_out_keys(keys, source.held_out, seed)
            held_out = [(key, document) for key, document in documents if key in drawn]
    held_keys = {_words(key) for key, _ in held_out}
    train = [document for key, document in documents if not held_keys or _words(key) not in held_keys]
    if not train:
        if getattr(source, "validation", None):
            raise BadInput(f"data: {_name(source)}: all its texts are in its validation as well; give others there")
        different = len({_words(key) for key, _ in documents})
        of_all = "" if different == len(documents) else f" ({different} different of {len(documents)})"
        raise BadInput(
            f"data: {_name(source)} has too few documents{of_all}: nothing is left after the held-out part; "
            "give more, or name others as validation"
        )
    hides_tools = notes.tools and "tools" not in (tokenizer.chat_template or ALPACA_TEMPLATE)
    measured = [document for _, document in held_out]
    return Documents(train, measured, notes.skipped, hides_tools, notes.hidden, notes.weighted)


def reference_documents(tokenizer: Any) -> list[Document]:
    """Python's language reference, one document per topic, for metrics that should not depend on the recipe."""
    documents, *_ = _documents(PydocSource(), reference_rows(), tokenizer, None)
    return [document for _, document in documents]


def held_out_keys(keys: set[str], fraction: float, seed: int) -> set[str]:
    """The keys whose hash is below `fraction`; at least one unless `fraction` is 0.

    Except for that one, the choice of a key does not depend on the other keys. So a source that is read both as texts
    and as questions holds out the same topics.
    """
    hashes = {
        key: int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=6).digest()) / 2**48 for key in keys
    }
    held_out = {key for key, value in hashes.items() if value < fraction}
    return held_out or ({min(hashes, key=lambda key: hashes[key])} if fraction else set())


def _words(key: str) -> str:
    """A key in which only the words count: copies of a text often end differently, or have other line ends."""
    return " ".join(key.split())


def _parted(source: Any, found: Iterator[DataRow]) -> Iterator[DataRow]:
    """The rows `found` of `source`. If part of the texts is to be held out, but there is only one, it becomes two: the
    second has the key END, and `source.held_out` of the characters or up to twice as many."""
    first = list(islice(found, 2)) if source.held_out and source.format == "text" else []
    if len(first) == 1 and isinstance(first[0].value, dict):
        row, name = first[0], getattr(source, "field", None) or "text"
        text = row.value.get(name)
        size = len(text) if isinstance(text, str) else 0
        held_out = round(size * source.held_out)
        end = document_end(text, size - 2 * held_out, size - held_out) if held_out else 0
        if end and text[end - 1].isspace() and text[:end].strip() and text[end:].strip():  # never within a word
            first = [
                DataRow(row.where, {name: text[:end]}),
                DataRow(f"the end of {row.where}", {name: text[end:]}, END),
            ]
    return chain(first, found)


def _name(source: AnySource) -> str:
    return getattr(source, "path", None) or getattr(source, "id", None) or source.source


def _read(source: TeacherSource, path: Path, tokenizer: Any) -> list[tuple[str, Document]]:
    """[(key, document)] of the text that the base wrote to the file `path`. Raises BadInput if its size is wrong."""
    ids = np.fromfile(path, "<u4").astype(np.int32)
    if len(ids) != source.written_tokens:
        raise BadInput(f"{path}: has {len(ids)} tokens, which is not what the recipe asks for; remove the file")
    ids_NT = ids.reshape(-1, source.document_tokens)
    texts = tokenizer.batch_decode(ids_NT, skip_special_tokens=True)
    loss_T, prefix = np.ones(source.document_tokens, bool), text_prefix(tokenizer)
    return [
        (text, Document(ids_T, loss_T, len(text.encode()), _begin(ids_T, prefix))) for text, ids_T in zip(texts, ids_NT)
    ]


def _documents(
    source: Any, found: Iterable[DataRow], tokenizer: Any, progress: Report | None
) -> tuple[list[tuple[str, Document]], _Notes]:
    """[(key, document)] of every nonempty row, and what is noted of all rows. Raises BadInput if all are empty."""
    template = tokenizer.chat_template or ALPACA_TEMPLATE
    special = source.format == "text" or template is ALPACA_TEMPLATE  # a model's template has them
    if source.format != "text" and template is ALPACA_TEMPLATE and tokenizer.eos_token is None:
        raise BadInput(
            f"data: {_name(source)} has responses, but the tokenizer has no token that ends one; give it an eos_token "
            "or a chat template"
        )
    texts: list[_Text | None] = []
    documents: list[tuple[str, Document]] = []
    notes = _Notes()
    found = iter(found)
    while texts := [_text(source, row, tokenizer, template) for row in islice(found, 256)]:
        batch = [text for text in texts if text is not None]
        notes.skipped += len(texts) - len(batch)
        notes.tools = notes.tools or any(text.tools for text in batch)
        notes.hidden = notes.hidden.union(*(text.hidden for text in batch))
        notes.weighted += sum(text.weighted for text in batch)
        documents += zip([text.key for text in batch], _tokenize(batch, tokenizer, special))
        if progress is not None:
            progress(len(documents), None, f"{len(documents):,} documents")
    if not documents:
        chat = "a question and its answer, which are messages of the roles user and assistant"
        raise BadInput(f"data: {_name(source)} has no row with {chat if source.format == 'messages' else 'any text'}")
    return documents, notes


def _text(source: Any, row: DataRow, tokenizer: Any, template: str) -> _Text | None:
    """The text of a row; None if it is empty. Raises BadInput for a row that cannot be used."""
    if not isinstance(row.value, dict):
        raise BadInput(f"{row.where}: is a JSON {type(row.value).__name__}; a row is an object with named fields")
    weighted = row.value.get("weight") not in (None, "", 1, "1", "1.0")
    if source.format == "text":
        text = _field(row, getattr(source, "field", None) or "text")
        return _Text(row.where, text, None, row.key or text, weighted=weighted) if text.strip() else None
    tools = None
    if source.format == "alpaca":
        messages = _alpaca(row, headed=template is ALPACA_TEMPLATE)
    else:
        messages, tools = _messages(row, getattr(source, "field", None)), _tools(row)
    if not messages or not messages[-1]["content"].strip():
        return None
    if not any(_learned(message) for message in messages):
        return None
    try:
        called = [_with_arguments(message) for message in messages]
        try:
            text, spans, hidden = _render(called, tokenizer, template, tools)
        except BadInput:
            if called == messages:
                raise
            text, spans, hidden = _render(messages, tokenizer, template, tools)  # some templates take JSON text
    except BadInput as error:
        raise BadInput(f"{row.where}: {error}") from None
    if not spans:
        raise BadInput(
            f"{row.where}: with this chat template, its responses cannot be told apart from the text before them"
        )
    return _Text(row.where, text, spans, row.key or text, tools is not None, hidden, weighted)


def _field(row: DataRow, name: str, default: str | None = None) -> str:
    """The text of column `name`; null counts as empty. default: returned if there is no such column. Raises BadInput if
    there is no such column and no default, and if it is not a string."""
    if name not in row.value and default is not None:
        return default
    if name not in row.value:
        there = f"it has {', '.join(map(repr, row.value)) or 'none'}"
        raise BadInput(f"{row.where}: has no field {name!r} ({there}){_format_hint(row.value, name)}")
    if row.value[name] is not None and not isinstance(row.value[name], str):
        raise BadInput(f"{row.where}: field {name!r} is a {type(row.value[name]).__name__}; it should be a string")
    return row.value[name] or ""


def _format_hint(value: dict[str, Any], name: str) -> str:
    """A hint for the error message: the field of a recipe with which such a row can be read, if that is obvious."""
    if {"instruction", "output"} <= value.keys() and name not in ("instruction", "output"):
        return "; in a recipe, give the source format: alpaca"
    if any(column in value for column in CHATS) or value.keys() >= PAIR:
        return "; in a recipe, give the source format: messages"
    texts = [column for column, content in value.items() if isinstance(content, str)]
    return f"; name the column of the text, field: {texts[0]}" if name == "text" and len(texts) == 1 else ""


def _alpaca(row: DataRow, *, headed: bool) -> list[dict[str, str]]:
    if row.value.get("history"):
        raise BadInput(f"{row.where}: has turns in the field 'history', which is not read; give all turns as messages")
    instruction, context = _field(row, "instruction"), _field(row, "input", default="")
    if context:
        instruction += ("\n\n### Input:\n" if headed else "\n\n") + context
    asked = [{"role": "user", "content": instruction}, {"role": "assistant", "content": _field(row, "output")}]
    return _with_system(row, asked)


def _messages(row: DataRow, field: str | None) -> list[dict[str, str]]:
    """The conversation of a row, as messages with role and content.

    Also reads ShareGPT's messages with from and value, and a prompt with its completion, each a string or a list of
    messages. Empty if it contains no question with a response. Raises BadInput for anything else.
    """
    if field is None and not any(column in row.value for column in CHATS) and row.value.keys() >= PAIR:
        if row.value.get("label") is False:  # in TRL's format of preferences, a completion that is to be avoided
            return []
        name = "prompt, completion"
        asked, answered = (
            [{"role": role, "content": part}] if isinstance(part := row.value[column], str) else part
            for column, role in (("prompt", "user"), ("completion", "assistant"))
        )
        messages = asked + answered if isinstance(asked, list) and isinstance(answered, list) else None
    else:
        name = field or next((column for column in CHATS if column in row.value), CHATS[0])
        messages = row.value.get(name)
    if not isinstance(messages, list):
        raise BadInput(f"{row.where}: field {name!r} should be a list of messages with role and content")
    messages = [_with_text(_from_sharegpt(message)) for message in messages]
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            what = "should have a role and a content, both texts; a content in parts may hold only texts"
            raise BadInput(f"{row.where}: message {number} of {name!r} {what}")
        if message["role"] == "assistant" and message.get("weight") not in (None, 0, 1):
            what = "should have a weight of 0, not to be learned, or 1; no other is read"
            raise BadInput(f"{row.where}: message {number} of {name!r} {what}")
    return _from_question_to_response(_with_system(row, messages))


def _learned(message: dict[str, Any]) -> bool:
    """Whether a message is a response that counts in the loss; a weight of 0 says that it does not, as in OpenAI's
    format."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _with_system(row: DataRow, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation, with the system message that some data sets have in a column beside it. Raises BadInput if the
    two differ, or if the column is no text."""
    name = next((name for name in SYSTEM if row.value.get(name)), None)
    said = _field(row, name).strip() if name is not None else ""
    if not said:
        return messages
    own = [message["content"] for message in messages if message["role"] == "system"]
    if own and own[0].strip() != said:
        raise BadInput(f"{row.where}: has a system message and another one in the field {name!r}; give one of the two")
    return messages if own else [{"role": "system", "content": said}, *messages]


def _tools(row: DataRow) -> list[dict[str, Any]] | None:
    """The tools that the assistant of a conversation may call, from a list or from JSON text, as many data sets have
    it; None if there are none. Raises BadInput for anything else."""
    tools = row.value.get("tools")
    if isinstance(tools, str) and tools.strip():
        with contextlib.suppress(ValueError):  # what is not JSON stays text, which is refused below
            tools = parse_json(tools)
    tools = tools or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadInput(f"{row.where}: field 'tools' should be a list of tools, each an object, or such a list as JSON")
    return tools or None


def _from_question_to_response(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The part of a conversation from the first question to the last response, with a leading system message; empty if
    there is none.

    Published conversations are often cut at some length, and then begin with a response or end without one.
    """
    roles = [message["role"] for message in messages]
    end = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    head = messages[:1] if roles[:1] == ["system"] else []
    asked = next((i for i in range(len(head), end) if roles[i] != "assistant"), end)
    return [*head, *messages[asked:end]] if asked < end else []


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    weight = {"weight": message["weight"]} if "weight" in message else {}
    return {"role": SHAREGPT_ROLES.get(message["from"], message["from"]), "content": message["value"], **weight}


def _with_text(message: Any) -> Any:
    """A message with a text for its content. A content in parts is accepted if all of them are texts. A message that
    calls tools and says nothing may have a null, as in OpenAI's format."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return message | {"content": ""}
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return message | {"content": "".join(part["text"] for part in content)}
    return message


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls of tools have objects for arguments, which chat templates write as JSON. OpenAI's format
    has JSON text there, which they would quote again."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    return message | {"tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return call | {"function": _parsed(call["function"])}
    with contextlib.suppress(ValueError):  # what is not JSON stays text
        if isinstance(text := call.get("arguments"), str) and isinstance(found := parse_json(text), dict):
            return call | {"arguments": found}
    return call


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _render(
    messages: list[dict[str, str]], tokenizer: Any, template: str, tools: list[dict[str, Any]] | None
) -> tuple[str, list[tuple[int, int]], frozenset[str]]:
    """The conversation as text, the character ranges of its responses, and the roles of messages that it does not show.

    Some templates render a turn differently once others follow, for example without its reasoning. Such a turn is not
    counted as a response. Nor is one with a weight of 0, nor one without content of which the template shows nothing
    else, such as calls of tools: it would teach to end a turn at once.
    """

    def render(upto: int, ask: bool = False, last: dict[str, str] | None = None) -> str:
        shown = messages[:upto] if last is None else [*messages[: upto - 1], last]
        return templates.render(tokenizer, shown, template, ask=ask, tools=tools, today=False)

    text = render(len(messages))
    spans, hidden = [], set[str]()
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            if not _learned(message):
                continue
            asked, answered = render(i, ask=True), render(i + 1)
            silent = {"role": "assistant", "content": message["content"]}
            if not message["content"].strip() and render(i + 1, last=silent) == answered:
                continue
            if text.startswith(answered) and answered.startswith(asked):
                spans.append((len(asked), len(answered.rstrip())))
        elif message["content"].strip() not in text:  # it may be escaped: what is hidden makes no difference
            other = [*messages[:i], message | {"content": "."}, *messages[i + 1 :]]
            if templates.render(tokenizer, other, template, tools=tools, today=False) == text:
                hidden.add(message["role"])
    return text, spans, frozenset(hidden)


def _tokenize(texts: Sequence[_Text], tokenizer: Any, special: bool) -> Iterator[Document]:
    if not texts:
        return
    spans, prefix = any(text.spans is not None for text in texts), text_prefix(tokenizer)
    with refusing(f"{texts[0].where} to {texts[-1].where}: the tokenizer fails on these texts"):
        encoded = tokenizer(
            [text.text for text in texts],
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=spans,
            verbose=False,
        )
    for i, text in enumerate(texts):
        ids_N = np.array(encoded["input_ids"][i], np.int32)
        check_ids(tokenizer, ids_N, text.where)
        loss_N = np.full(len(ids_N), text.spans is None)
        if text.spans is not None:
            start_N, end_N = np.array(encoded["offset_mapping"][i]).reshape(-1, 2).T
            for begin, end in text.spans:
                # special tokens added by the tokenizer have empty ranges, as they are not in the text
                loss_N |= (start_N >= begin) & (end_N <= end) & (start_N < end_N)
        yield Document(ids_N, loss_N, len(text.text.encode()), _begin(ids_N, prefix))


def _begin(ids_N: np.ndarray, prefix: list[int]) -> int:
    """How many tokens of `prefix` `ids_N` begins with: all or none, since a chat template may leave them out. prefix:
    see `text_prefix`."""
    return len(prefix) if ids_N[: len(prefix)].tolist() == prefix else 0
