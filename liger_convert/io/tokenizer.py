"""Loads a model's tokenizer, tries it on a text, and checks it against the model's vocabulary."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_convert.io import templates
from liger_convert.io.files import read_json
from liger_convert.io.inputs import open_input
from liger_convert.utils.errors import BadInput, refusing

CONFIG, FAST, SENTENCEPIECE = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"
READERS = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # packages and their import names
GENERIC = "PreTrainedTokenizerFast"
PROBE = "Hello, world: 1 + 2 = 3\n"
WORD = re.compile("[▁Ġ]([a-z]{4,8})")  # tokens that are a word after a space
LEAST_WORDS, MOST_WORDS = 16, 64  # how many of them are tried


def load(folder: Path, vocabulary: int | None, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer in `folder`, for a model with `vocabulary` embeddings (None: unknown).

    Raises BadInput if it cannot be loaded, fails on a text, splits words of its own vocabulary, has a broken chat
    template, or does not fit the model's vocabulary.
    """
    from transformers import AutoTokenizer

    _require_reader(folder)
    with _no_panic_message(), refusing(f"{folder}: its tokenizer cannot be used"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        vocab = tokenizer.get_vocab()
        ids = tokenizer([PROBE, PROBE], return_offsets_mapping=tokenizer.is_fast)["input_ids"][0]
        plain = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        tokenizer.decode(ids)
    if not vocab or not plain:
        raise BadInput(f"{folder}: its tokenizer has no usable vocabulary: it makes no token from {PROBE!r}")
    if (word := split_word(tokenizer)) is not None:
        what = f"splits words of its own vocabulary, such as {word!r}"
        raise BadInput(f"{folder}: its tokenizer {what}; give it the merges that belong to this vocabulary")
    if isinstance(tokenizer.chat_template, dict):  # several templates, by name
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if (template := tokenizer.chat_template) is not None:
        if not isinstance(template, str):
            raise BadInput(
                f"{templates.file_in(folder)}: the chat template is a {type(template).__name__}; it should be text"
            )
        try:
            shown = templates.render(tokenizer, [{"role": "user", "content": PROBE}], template, ask=True)
            if PROBE.strip() not in shown:  # such as one for contents of several parts only
                what = "does not show the text of a message; it should do so where message['content'] is a string"
                raise templates.BadTemplate(f"the chat template {what}")
        except templates.BadTemplate as error:
            raise BadInput(f"{templates.file_in(folder)}: {error}") from None
        except BadInput:
            pass  # it may require more than a single user turn
    if vocabulary is not None:
        _check_vocabulary(folder, tokenizer, vocab, special, vocabulary)
        tokenizer.embeddings = vocabulary
    return tokenizer


def _check_vocabulary(
    folder: Path, tokenizer: Any, vocab: dict[str, int], special: dict[str, int | None], size: int
) -> None:
    """Raises BadInput if ordinary text may be tokenized to ids without an embedding.

    Added tokens beyond the embeddings are accepted: some published models have them, for images for example. They do
    not occur in ordinary text, and `check_ids` refuses text that has them.
    """
    for name, number in special.items():
        if number is not None and number >= size:
            raise BadInput(
                f"{folder}: its tokenizer's {name} token has id {number}, but the model has {size:,} embeddings "
                "(vocab_size in config.json); use a smaller id or resize the model"
            )
    added = set(tokenizer.added_tokens_decoder)
    beyond = sorted((i, token) for token, i in vocab.items() if i >= size and i not in added)
    if beyond:
        i, token = beyond[0]
        raise BadInput(
            f"{folder}: its tokenizer has {len(beyond):,} tokens beyond the model's {size:,} embeddings (vocab_size in "
            f"config.json), such as {token!r}, id {i}; it belongs to another model"
        )


def split_word(tokenizer: Any) -> str | None:
    """A word that is a token of the vocabulary and is split nevertheless, if most such words are; else None.

    A tokenizer without its merges does so. It makes several times as many tokens from a text, which a model has never
    seen like that, but reads every text back without an error.
    """
    vocab = tokenizer.get_vocab()
    words = {found[1]: vocab[token] for token in vocab if (found := WORD.fullmatch(token))}
    tried = sorted(words, key=words.__getitem__)[:: max(1, len(words) // MOST_WORDS)]
    if len(tried) < LEAST_WORDS:
        return None
    ids = tokenizer([f"a {word} a" for word in tried], add_special_tokens=False)["input_ids"]
    split = [word for word, found in zip(tried, ids) if words[word] not in found]
    return split[0] if 2 * len(split) > len(tried) else None


def text_prefix(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before every text: its BOS token, or nothing; those of GLM-4 put two."""
    plain, ids = (list(tokenizer(PROBE, add_special_tokens=special)["input_ids"]) for special in (False, True))
    starts = (i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)
    return ids[: next(starts, ids[:1] == [tokenizer.bos_token_id])]


def closes_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer puts the end-of-text token after every text, as those of some finetunes do. A text that is
    to be continued has to be without it."""
    return tokenizer(PROBE)["input_ids"][-1:] == [tokenizer.eos_token_id]


def check_ids(tokenizer: Any, ids: Any, where: str) -> None:
    """Raises BadInput, with a message that begins with `where`, if one of the `ids` (a list or an array) has no
    embedding in this tokenizer's model. Does nothing if the number of embeddings is unknown."""
    size = getattr(tokenizer, "embeddings", None)
    if size is not None and len(ids) and (largest := int(max(ids))) >= size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise BadInput(f"{where}: contains {token!r}, token {largest}, but the model has {size:,} embeddings")


def class_name(base: Path, trust_remote_code: bool = False) -> str | None:
    """The name of the class with which transformers loads the tokenizer of `base`; None if the tokenizer brings its own
    code. Raises BadInput if it cannot be loaded.

    transformers chooses the class by the model type if it knows that, and only otherwise by tokenizer_config.json. It
    does not know the types of linearized models, and another class may tokenize differently: OLMo 2 and Granite name
    GPT2Tokenizer, but are not loaded with it. So a copy of the tokenizer has to name the class, see `name_class`.
    """
    from transformers import AutoTokenizer

    _require_reader(base)
    if (base / CONFIG).exists() and "auto_map" in read_json(base / CONFIG):
        return None
    with _no_panic_message(), refusing(f"{base}: its tokenizer cannot be used"):
        name = type(AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code)).__name__
    return GENERIC if name == "TokenizersBackend" else name  # the older name, which transformers 4 also knows


def name_class(folder: Path, name: str) -> None:
    """Sets the class in the tokenizer_config.json of `folder`, unless it already names that class."""
    path = folder / CONFIG
    config = read_json(path) if path.exists() else {}
    if config.get("tokenizer_class") != name:
        path.write_text(json.dumps(config | {"tokenizer_class": name}, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _require_reader(folder: Path) -> None:
    """Raises BadInput if the only tokenizer file is a SentencePiece model and a package for reading it is missing."""
    if (folder / FAST).exists() or not (folder / SENTENCEPIECE).is_file():
        return
    with open_input(folder / SENTENCEPIECE) as file:
        is_sentencepiece = file.read(1) == b"\n"  # a protobuf's first tag; a tiktoken file begins with text
    if is_sentencepiece:
        missing = [name for name, module in READERS.items() if not _is_installed(module)]
        if missing:
            what = f"pip install {' '.join(missing)}, or put its {FAST} there"
            raise BadInput(f"{folder}: its tokenizer is only a {SENTENCEPIECE}, which needs more packages; {what}")


def _is_installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _no_panic_message() -> Iterator[None]:
    """Context that hides stderr, because Rust prints a panic there before Python gets the exception."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
