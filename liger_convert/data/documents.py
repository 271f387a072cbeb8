"""Documents: rows of a source become token ids with a mask of what is learned; see `packed_rows` for training rows.

Shapes: N tokens of a document, T tokens of each document that the base wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from liger_convert.config.sources import AnySource, TeacherSource
from liger_convert.data.sources import Row, rows
from liger_convert.io import templates
from liger_convert.io.tokenizer import check_ids
from liger_convert.utils.errors import BadInput, refusing
from liger_convert.utils.progress import Report

# Stanford Alpaca's layout, for tokenizers without a chat template.
ALPACA_TEMPLATE = (
    "{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the request.' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '\n\n### Response:\n' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}{{ '\n\n### Instruction:\n' + message['content'] }}"
    "{% else %}{{ '\n\n' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Document:
    """ids_N: int32 token ids. loss_N: bool, which of them are learned in a stage that learns responses only (all of a
    plain text). text_bytes: size of the text in UTF-8, for measures per byte."""

    ids: np.ndarray
    loss: np.ndarray
    text_bytes: int


@dataclass(frozen=True)
class Documents:
    """What a source gives: documents to train on, documents kept from it, and how many rows had nothing in them."""

    train: list[Document]
    held_out: list[Document]
    skipped: int


@dataclass(frozen=True, slots=True)
class _Text:
    """A text before it is tokenised. where: its row. spans: character ranges that are learned, None for all of it."""

    where: str
    text: str
    spans: list[tuple[int, int]] | None
    key: str


def load_source(
    source: AnySource, tokenizer: Any, *, seed: int = 0, written: Path | None = None, progress: Report | None = None
) -> Documents:
    """All documents of `source` as token ids, its held-out part apart.

    Held out are the documents of `source.validation`, or those whose hash of `seed` and text is below
    `source.held_out`, at least one: the same ones in every run, and no text on both sides. A plain text is tokenised
    as the tokenizer does it by itself; chat rows by its chat template (Alpaca's layout when it has none), where the
    learned tokens are the assistant's, up to the mark that ends its turn. What the base wrote itself is read from the
    file `written`, see `teacher.write`; its first documents are held out, and what they say is not trained on.
    Raises BadInput naming file and line for a row that cannot be used.
    """
    if not tokenizer.is_fast:
        raise BadInput("the tokenizer has no fast version (tokenizer.json), which locating responses in a chat needs")
    skipped = 0
    if isinstance(source, TeacherSource):
        assert written is not None
        documents = _read(source, written, tokenizer)
        held_out = documents[: source.held_out_documents]
    else:
        documents, skipped = _documents(source, rows(source), tokenizer, progress)
        if getattr(source, "validation", None):
            held_out, more = _documents(source, rows(source, validation=True), tokenizer, progress)
            skipped += more
        else:
            drawn = held_out_keys({key for key, _ in documents}, source.held_out, seed)
            held_out = [(key, document) for key, document in documents if key in drawn]
    held_keys = {key for key, _ in held_out}
    train = [document for key, document in documents if key not in held_keys]
    if not train:
        raise BadInput(f"data: {_name(source)} has too few documents: nothing is left beside what is held out")
    return Documents(train, [document for _, document in held_out], skipped)


def held_out_keys(keys: set[str], fraction: float, seed: int) -> set[str]:
    """Those whose hash is below `fraction`, at least one when it is not 0. A key falls on the same side whatever the
    others are, so a source read as texts and as questions holds out the same topics."""
    hashes = {
        key: int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=6).digest()) / 2**48 for key in keys
    }
    held_out = {key for key, value in hashes.items() if value < fraction}
    return held_out or ({min(hashes, key=lambda key: hashes[key])} if fraction else set())


def _name(source: AnySource) -> str:
    return getattr(source, "path", None) or getattr(source, "id", None) or source.source


def _read(source: TeacherSource, path: Path, tokenizer: Any) -> list[tuple[str, Document]]:
    """[(key, document)] of what the base wrote."""
    ids = np.fromfile(path, "<u4").astype(np.int32)
    if len(ids) != source.written_tokens:
        raise BadInput(f"{path}: holds {len(ids)} tokens, which is not what the recipe asks for; remove the file")
    ids_NT = ids.reshape(-1, source.document_tokens)
    texts = tokenizer.batch_decode(ids_NT, skip_special_tokens=True)
    loss_T = np.ones(source.document_tokens, bool)
    return [(text, Document(ids_T, loss_T, len(text.encode()))) for text, ids_T in zip(texts, ids_NT)]


def _documents(
    source: Any, found: Iterable[Row], tokenizer: Any, progress: Report | None
) -> tuple[list[tuple[str, Document]], int]:
    """[(key, document)] of every row with something in it, and the number of rows without."""
    template = tokenizer.chat_template or ALPACA_TEMPLATE
    special = source.format == "text" or template is ALPACA_TEMPLATE  # a model's own template writes them itself
    texts: list[_Text | None] = []
    documents: list[tuple[str, Document]] = []
    skipped = 0
    found = iter(found)
    while texts := [_text(source, row, tokenizer, template) for row in islice(found, 256)]:
        batch = [text for text in texts if text is not None]
        skipped += len(texts) - len(batch)
        documents += zip([text.key for text in batch], _tokenize(batch, tokenizer, special))
        if progress is not None:
            progress(len(documents), None, f"{len(documents):,} documents")
    if not documents:
        raise BadInput(f"data: {_name(source)} has no row with any text")
    return documents, skipped


def _text(source: Any, row: Row, tokenizer: Any, template: str) -> _Text | None:
    """What a row says; None when it says nothing. Raises BadInput for a row that cannot be used."""
    if not isinstance(row.value, dict):
        raise BadInput(f"{row.where}: is a JSON {type(row.value).__name__}; a row is an object with named fields")
    if source.format == "text":
        text = _field(row, getattr(source, "field", None) or "text")
        return _Text(row.where, text, None, row.key or text) if text.strip() else None
    if source.format == "alpaca":
        messages = _alpaca(row, headed=template is ALPACA_TEMPLATE)
    else:
        messages = _messages(row, getattr(source, "field", None) or "messages")
    if not messages[-1]["content"].strip():
        return None
    try:
        text, spans = _render(messages, tokenizer, template)
    except BadInput as error:
        raise BadInput(f"{row.where}: {error}") from None
    if not spans:
        raise BadInput(f"{row.where}: the chat template does not let its responses be told from what precedes them")
    return _Text(row.where, text, spans, row.key or text)


def _field(row: Row, name: str, default: str | None = None) -> str:
    if name not in row.value and default is not None:
        return default
    if name not in row.value:
        raise BadInput(f"{row.where}: has no field {name!r} (it has {', '.join(map(repr, row.value)) or 'none'})")
    if not isinstance(row.value[name], str):
        raise BadInput(f"{row.where}: field {name!r} is a {type(row.value[name]).__name__}; it should be a string")
    return row.value[name]


def _alpaca(row: Row, *, headed: bool) -> list[dict[str, str]]:
    instruction, context = _field(row, "instruction"), _field(row, "input", default="")
    if context:
        instruction += ("\n\n### Input:\n" if headed else "\n\n") + context
    return [{"role": "user", "content": instruction}, {"role": "assistant", "content": _field(row, "output")}]


def _messages(row: Row, name: str) -> list[dict[str, str]]:
    if not isinstance(row.value.get(name), list):
        raise BadInput(f"{row.where}: field {name!r} should be a list of messages with role and content")
    messages = row.value[name]
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadInput(f"{row.where}: message {number} of {name!r} should have a role and a content, both strings")
    roles = [message["role"] for message in messages]
    if not messages or roles[-1] != "assistant" or roles[0] == "assistant":
        raise BadInput(f"{row.where}: {name!r} should begin with what is asked and end with an assistant message")
    return messages


def _render(messages: list[dict[str, str]], tokenizer: Any, template: str) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text and the character ranges of its responses. A turn that the template writes differently
    once others follow (some drop earlier reasoning) is context only."""

    def render(upto: int, ask: bool = False) -> str:
        return templates.render(tokenizer, messages[:upto], template, ask=ask)

    text = render(len(messages))
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            asked, answered = render(i, ask=True), render(i + 1)
            if text.startswith(answered) and answered.startswith(asked):
                spans.append((len(asked), len(answered.rstrip())))
    return text, spans


def _tokenize(texts: Sequence[_Text], tokenizer: Any, special: bool) -> Iterator[Document]:
    if not texts:
        return
    spans = any(text.spans is not None for text in texts)
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
                # a special token that the tokenizer adds is empty: it stands nowhere in the text
                loss_N |= (start_N >= begin) & (end_N <= end) & (start_N < end_N)
        yield Document(ids_N, loss_N, len(text.text.encode()))


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of exactly T tokens from documents put behind each other; a document that ends a row is cut there, and its
    rest is a segment of its own in the next row. No padding.

    An item is {"input_ids", "position_ids", "labels"}, int64 [T]: positions restart at 0 with each segment, which is
    what keeps documents apart in attention; the label of a segment's first token, which nothing in the segment
    precedes, is -100, and with `responses_only` so is that of every token outside a document's `loss` mask.
    Nothing is copied before an item is asked for: the data set holds the documents, and their order in some epochs.

    With `joined` a row is one segment, whatever it is made of: what a memory still holds after thousands of tokens is
    learned in long segments, and most documents are short.

    A share `repeats` of the rows says a stretch twice, so that there is something beyond the window to remember: text
    alone rewards the window almost alone. Such a row is one document, or the copy could not be seen. Which rows, and
    where, depends on `seed` and the row's number only. Does not go with `responses_only`: the masks know no copies.

    `shorter` are pairs (length, share): in that share of the micro-batches, which are `batch_size` rows each, all rows
    are cut into pieces of that length, each a row by itself. Such an item is [T / length, length].
    """

    def __init__(
        self,
        documents: Sequence[Document],
        seq_len: int,
        rows: int,
        responses_only: bool,
        repeats: float,
        joined: bool,
        shorter: Sequence[tuple[int, float]],
        batch_size: int,
        seed: int,
    ):
        self.documents = documents
        self.tokens = sum(len(document.ids) for document in documents)
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.seq_len, self.rows, self.responses_only = seq_len, rows, responses_only
        self.repeats, self.combineed, self.seed = repeats, joined, seed
        self.batch_size = batch_size
        self.lengths = [seq_len, *(length for length, _ in shorter)]
        self.shares = [1 - sum(share for _, share in shorter), *(share for _, share in shorter)]

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < self.rows:
            raise IndexError(row)
        drawn = np.random.default_rng((self.seed, row // self.batch_size, 2)).choice(self.lengths, p=self.shares)
        return self.whole(row) if drawn == self.seq_len else self._cut(row, int(drawn))

    def whole(self, row: int) -> dict[str, Tensor]:
        """The row as it is where there are no shorter ones, [T] each."""
        return {name: x_1T[0] for name, x_1T in self._cut(row, self.seq_len).items()}

    def _cut(self, row: int, length: int) -> dict[str, Tensor]:
        """The row in pieces, [T / length, length] each."""
        rng = np.random.default_rng((self.seed, row, 1))  # 1: not the stream that drew an order
        starts = range(row * self.seq_len, (row + 1) * self.seq_len, length)
        arrays = zip(*(self._tokens(at, length, rng) for at in starts))
        names = "input_ids", "position_ids", "labels"
        return {name: torch.from_numpy(np.stack(pieces)) for name, pieces in zip(names, arrays, strict=True)}

    def _tokens(self, at: int, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, positions and labels of the tokens from `at` on, of all in the documents' order, as one row."""
        input_ids_T, position_ids_T, labels_T = (np.empty(length, np.int64) for _ in range(3))
        filled = 0
        epoch, inside = divmod(at, self.tokens)
        order, ends = self._epoch(epoch)
        which = int(np.searchsorted(ends, inside, side="right"))
        while filled < length:
            if which == len(order):
                epoch, which = epoch + 1, 0
                order, ends = self._epoch(epoch)
            document = self.documents[order[which]]
            begin = at + filled - epoch * self.tokens - int(ends[which]) + len(document.ids)
            ids_N = document.ids[begin : begin + length - filled]
            segment = slice(filled, filled + len(ids_N))
            input_ids_T[segment] = labels_T[segment] = ids_N
            position_ids_T[segment] = np.arange(len(ids_N)) + (filled if self.combineed else 0)
            if self.responses_only:
                labels_T[segment][~document.loss[begin : begin + len(ids_N)]] = IGNORED
            if not (self.combineed and filled):
                labels_T[filled] = IGNORED
            filled += len(ids_N)
            which += 1
        if rng.random() < self.repeats:
            self._repeat(input_ids_T, rng)
            position_ids_T[:] = np.arange(length)
            labels_T[1:] = input_ids_T[1:]
        return input_ids_T, position_ids_T, labels_T

    def _repeat(self, ids_T: np.ndarray, rng: np.random.Generator) -> None:
        """Writes one stretch of a row over a later place in it; every pair of places without overlap is as likely."""
        T = len(ids_T)
        shortest, longest = max(1, min(32, T // 4)), T // 2 - T // 32
        length = int(rng.integers(shortest, longest, endpoint=True))
        # of the tokens outside both stretches, so many stand before the first one, and so many before the second
        first, second = np.sort(rng.choice(T - 2 * length + 2, 2, replace=False)) - (0, 1)
        if rng.random() < RANDOM_REPEATS:
            at_N = rng.integers(math.ceil(self.epochs) * self.tokens, size=length)  # of all tokens of all epochs
            ids_T[first : first + length] = [self._token(int(at)) for at in at_N]
        ids_T[second + length : second + 2 * length] = ids_T[first : first + length]

    def _token(self, at: int) -> int:
        epoch, inside = divmod(at, self.tokens)
        order, ends = self._epoch(epoch)
        which = int(np.searchsorted(ends, inside, side="right"))
        return self.documents[order[which]].ids[inside - ends[which]]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents in an epoch, and where each of them ends in it. Drawn when it is needed: a budget
        of tokens may be any number of times the text."""
        if epoch not in self._orders:
            if len(self._orders) == ORDERS:
                del self._orders[next(iter(self._orders))]
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
            self._orders[epoch] = order, np.cumsum([len(self.documents[i].ids) for i in order])
        return self._orders[epoch]

    @property
    def epochs(self) -> float:
        """How many times the documents are gone through."""
        return self.rows * self.seq_len / self.tokens


def pack(
    documents: Sequence[Document],
    seq_len: int,
    tokens: int | None = None,
    seed: int = 0,
    *,
    responses_only: bool = False,
    repeats: float = 0.0,
    joined: bool = False,
    shorter: Sequence[tuple[int, float]] = (),
    batch_size: int = 1,
) -> PackedDataset:
    """`tokens // seq_len` rows of `documents` in an order drawn from `seed`, a new one each time they have all been
    used; without `tokens`, as many full rows as one pass gives. The tokens that fill no row are dropped.
    The other arguments are explained at PackedDataset.

    Raises BadInput when that is not one row.
    """
    documents = [document for document in documents if len(document.ids)]
    total = sum(len(document.ids) for document in documents)
    rows = (total if tokens is None else tokens) // seq_len
    if not total or not rows:
        raise BadInput(f"data: {total if tokens is None else tokens} tokens do not fill one row of {seq_len} (seq_len)")
    return PackedDataset(documents, seq_len, rows, responses_only, repeats, joined, shorter, batch_size, seed)


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Items of a PackedDataset, all of one length -> one batch, [B,T] each."""
    return {name: torch.cat([item[name].view(-1, item[name].shape[-1]) for item in items]) for name in items[0]}
