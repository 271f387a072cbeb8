"""Where a recipe's documents come from: Python's documentation, a file, the hub, or the base itself."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from liger_convert.config.fields import Count, Fraction, Length, Rows, Strict, Temperature, Tokens, refuse

Place = tuple[str | None, ...]


def meet(some: Collection[Place], others: Collection[Place]) -> bool:
    """Whether one of `some` is, contains or lies in one of `others`: then they have text in common."""
    return any(one[: len(other)] == other[: len(one)] for one in some for other in others)


class DataSource(Strict):
    """Documents to train on, and documents held out of training to measure the perplexity on."""

    source: str
    """Where the documents come from: pydoc, file, hub or teacher."""
    held_out: Fraction = 0.0
    """Fraction of the documents that is held out of training; `eval.text` measures on it."""

    @property
    def has_held_out(self) -> bool:
        return self.held_out > 0

    @property
    def has_responses(self) -> bool:
        """Whether its documents know which tokens are responses."""
        return False

    @property
    def places(self) -> set[Place]:
        """Where its documents are, those held out included."""
        return self.place_of(held_out=False) | self.place_of(held_out=True)

    def place_of(self, *, held_out: bool) -> set[Place]:
        """Where the documents are that it holds out, or that it does not hold out. Both may be one place."""
        return {(self.source,)}

    def spares(self, measured: DataSource) -> bool:
        """Whether it trains on no document that the source `measured` holds out."""
        if not meet(self.place_of(held_out=False), measured.place_of(held_out=True)):
            return True
        # documents are drawn by their keys alone, see `held_out_keys`
        return self.held_out >= measured.held_out > 0 and self.keys == measured.keys

    @property
    def keys(self) -> tuple[str | None, ...]:
        """What the keys of its documents are made of: two sources with equal ones give a document the same key."""
        return (self.source,)


class PydocSource(DataSource):
    """The documentation that ships with every Python, as texts or as questions and answers: needs no file and no
    network."""

    source: Literal["pydoc"] = "pydoc"
    """`pydoc`: the documentation of the Python that runs."""
    format: Literal["text", "messages"] = "text"
    """`text` for plain texts, `messages` for questions and answers."""

    @property
    def has_responses(self) -> bool:
        return self.format != "text"


class RowSource(DataSource):
    """Rows with a text, with Alpaca's instruction, input and output, or with a chat."""

    format: Literal["text", "alpaca", "messages"] = "text"
    """What a row holds: a text, Alpaca's instruction, input and output, or a chat (messages, ShareGPT's conversations,
    or a prompt and its completion)."""
    field: str | None = None
    """Column to read; by default `text`, or `messages` or `conversations` for a chat."""
    validation: Annotated[str, Field(min_length=1)] | None = None
    """Separate held-out documents, instead of `held_out`: another file, or another split of a data set."""

    @property
    def has_held_out(self) -> bool:
        return self.held_out > 0 or self.validation is not None

    @property
    def has_responses(self) -> bool:
        return self.format != "text"

    @property
    def keys(self) -> tuple[str | None, ...]:
        return (self.format, self.field)

    @model_validator(mode="after")
    def _consistent(self) -> RowSource:
        if self.field is not None and self.format == "alpaca":
            refuse("field", "Alpaca rows have fixed columns, so drop it or set format to text or messages")
        if self.held_out and self.validation is not None:
            refuse("held_out", "validation already names the held-out documents, so give one of the two")
        return self


class FileSource(RowSource):
    """A .txt, .jsonl, .json or .csv file, plain or compressed (.gz, .xz, .zst), a .parquet file, or a folder of
    them."""

    source: Literal["file"] = "file"
    """`file`: a file or a folder on this machine."""
    path: Annotated[str, Field(min_length=1)]
    """The file or folder; a relative path is relative to the working directory."""

    def place_of(self, *, held_out: bool) -> set[Place]:
        path = self.validation if held_out and self.validation is not None else self.path
        return {(self.source, *Path(os.path.realpath(path)).parts)}


class HubSource(RowSource):
    """A data set of the Hugging Face hub."""

    source: Literal["hub"] = "hub"
    """`hub`: a data set of the Hugging Face hub."""
    id: str
    """Id of the data set, such as yahma/alpaca-cleaned."""
    name: str | None = None
    """Configuration of the data set, if it has several."""
    split: str = "train"
    """Split to train on."""
    revision: str | None = None
    """Branch, tag or commit of the data set."""

    def place_of(self, *, held_out: bool) -> set[Place]:
        split = self.validation if held_out and self.validation is not None else self.split
        return {(self.source, self.id, self.name, split)}


class TeacherSource(DataSource):
    """Text that the base writes itself, sampled once per run."""

    source: Literal["teacher"] = "teacher"
    """`teacher`: text sampled from the base."""
    tokens: Tokens
    """How many tokens to write; tokens that would not fill a last document are left out."""
    document_tokens: Length = 512
    """Tokens of each document, including the prompt."""
    temperature: Temperature = 1.0
    """Temperature of the sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that together have this probability."""
    batch_size: Rows = 64
    """Documents written at a time; halved if a GPU runs out of memory."""
    prompt: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Texts that documents begin with, in turn; by default the token that begins a text."""
    prompts: str | None = None
    """Name of another source under `data:`. The base continues the beginnings of documents from its training part;
    documents that are too short are left out. For a chat, the base gives the first response."""
    prompt_tokens: Count = 64
    """With `prompts`, the base continues the first tokens of each document, at most this many."""

    def spares(self, measured: DataSource) -> bool:
        return True  # what is sampled is not sampled again

    @property
    def documents(self) -> int:
        """All of one length; the tokens that do not fill a last one are not written."""
        return self.tokens // self.document_tokens

    @property
    def written_tokens(self) -> int:
        return self.documents * self.document_tokens

    @property
    def held_out_documents(self) -> int:
        """At least one where any are: the first ones, since each is drawn without regard to the others."""
        return max(1, round(self.documents * self.held_out)) if self.held_out else 0

    @property
    def held_out_tokens(self) -> int:
        """At least, and known before any is written: measures may leave out the token that begins a document."""
        return self.held_out_documents * (self.document_tokens - 1)

    @model_validator(mode="after")
    def _prompted(self) -> TeacherSource:
        if self.prompts is not None and self.prompt is not None:
            refuse("prompts", "`prompt` already says what documents begin with, so give one of the two")
        if self.prompts is not None and self.prompt_tokens >= self.document_tokens:
            room = f"a document has only {self.document_tokens} tokens (document_tokens)"
            refuse("prompt_tokens", f"{self.prompt_tokens} leaves nothing to write, because {room}")
        return self

    @model_validator(mode="after")
    def _enough(self) -> TeacherSource:
        if self.documents < 1:
            refuse("tokens", f"{self.tokens} is less than one document (document_tokens = {self.document_tokens})")
        if self.held_out_documents == self.documents:
            refuse("held_out", f"holds out all documents (there are {self.documents}), so nothing is left to train on")
        return self


AnySource = Annotated[PydocSource | FileSource | HubSource | TeacherSource, Field(discriminator="source")]
