"""Completes what transformers' reader makes of the tokenizer in a .gguf file.

The reader splits the text for some vocabularies in another way than they were made for. It gives control tokens that
are not written in GPT-2's byte alphabet, such as DeepSeek's, new ids after the vocabulary. It leaves out the BOS token
where that follows from the vocabulary, and the token that ends a turn. Each would give a model tokens that it was not
trained on, without an error. Names of fields and vocabularies are those of llama.cpp.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from liger_convert.io import templates
from liger_convert.io.gguf_header import STRING, Header
from liger_convert.io.inputs import open_input
from liger_convert.utils.errors import BadInput

BYTE_LEVEL = "gpt2"  # the kind of tokenizer whose vocabularies are split in several ways
CONTROL, USER_DEFINED, INT_32 = 3, 4, 5  # types of tokens that are found as a whole; type of a list
# Vocabularies by how a text is split. These are split as GPT-2's, and so are those without a name:
PLAIN = {"default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum"}
# these too, once digits have been isolated:
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
# and these as Qwen2's. All others are left to transformers.
QWEN2 = {"qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"}
# Their texts begin with the BOS token, and a word that is a token becomes that token whatever the merges say.
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
ANSWER = "Yes, 5."  # of an assistant


def check(header: Header) -> None:
    """Raises BadInput for a vocabulary that is split in a way which neither transformers nor this module knows."""
    import transformers

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:  # transformers 5.17
        known = {}
    name = header.texts.get("tokenizer.ggml.pre")
    if header.texts.get("tokenizer.ggml.model") != BYTE_LEVEL or name is None:
        return
    if name not in PLAIN | SINGLE_DIGITS | QWEN2 | known.keys():
        what = f"transformers {transformers.__version__} cannot split text as its vocabulary {name!r} requires"
        raise BadInput(f"base: {header.path}: {what}; install a newer one, or give the model's own folder")


def complete(tokenizer: Any, header: Header) -> None:
    """Completes `tokenizer`, which transformers made of the file with this checked `header`, in place."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    if header.texts.get("tokenizer.ggml.model") != BYTE_LEVEL:
        return
    name = header.texts.get("tokenizer.ggml.pre")
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    moved = _restore_ids(data, tokenizer, header)
    data["model"]["ignore_merges"] = data["model"].get("ignore_merges") or name in WHOLE_WORDS
    backend = Tokenizer.from_str(json.dumps(data))
    plain, merged = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex) for regex in (True, False))
    if name in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif name in QWEN2:
        split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, merged])
    tokenizer._tokenizer = backend
    follows = name in WHOLE_WORDS and "tokenizer.ggml.add_bos_token" not in header.fields
    if moved or follows:
        tokenizer.add_bos_token = tokenizer.add_bos_token or follows  # also renews the ids of what is added to a text


def _restore_ids(data: dict[str, Any], tokenizer: Any, header: Header) -> bool:
    """Gives the tokens that are found as a whole the ids that they have in the file. If one had another, also removes
    those that the file does not have, and returns True. data: of the tokenizer, in the format of tokenizer.json."""
    tokens, kinds = _items(header, "tokenizer.ggml.tokens"), _items(header, "tokenizer.ggml.token_type")
    vocabulary: dict[str, int] = data["model"]["vocab"]
    found = {token["content"]: token["id"] for token in data["added_tokens"]}
    moved = {
        i: (text, kind)
        for i, (text, kind) in enumerate(zip(tokens, kinds))
        if kind in (CONTROL, USER_DEFINED) and found.get(text, vocabulary.get(text)) != i
    }
    if not moved:
        return False
    for spelling in [spelling for spelling, i in vocabulary.items() if i in moved]:
        del vocabulary[spelling]
    vocabulary |= {text: i for i, (text, _) in moved.items()}
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    texts = {text for text, _ in moved.values()}
    kept = [
        token
        for token in data["added_tokens"]
        if token["content"] not in texts and (token["id"] < len(tokens) or token["content"] in named)
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": text, **flags, "special": kind == CONTROL} for i, (text, kind) in moved.items()]
    data["added_tokens"] = sorted(kept + added, key=lambda token: token["id"])
    data["post_processor"] = None  # it has the ids of before
    return True


def _items(header: Header, name: str) -> list[Any]:
    """The texts or 32-bit integers in a list of a checked header; none if it is missing or of another type."""
    if (field := header.fields.get(name)) is None or field.items is None:
        return []
    with open_input(header.path) as file:
        file.seek(field.begin)
        data = file.read(field.end - field.begin)
    at = 8 + len(name.encode()) + 4
    kind, count = struct.unpack_from(f"{header.order}IQ", data, at)
    at += 12
    if kind == INT_32:
        return list(struct.unpack_from(f"{header.order}{count}i", data, at))
    texts = []
    for _ in range(count if kind == STRING else 0):
        (length,) = struct.unpack_from(f"{header.order}Q", data, at)
        texts.append(data[at + 8 : at + 8 + length].decode("utf-8", "replace"))
        at += 8 + length
    return texts


def ends(tokenizer: Any, header: Header, embeddings: int) -> list[int]:
    """The tokens that end a generated text: the end of a text, and the end of a turn by the header or by the chat
    template, which other files keep in generation_config.json. embeddings: how many tokens the model has."""
    found = {tokenizer.eos_token_id, header.numbers.get("tokenizer.ggml.eot_token_id")}
    messages = [{"role": "user", "content": "Two and three?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = templates.render(tokenizer, messages, tokenizer.chat_template) if tokenizer.chat_template else ""
    except BadInput:  # told when the model is used
        text = ""
    behind = text.rpartition(ANSWER)[2].lstrip()
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    turn = max((token for token in special if behind.startswith(token)), key=len, default=None)
    found |= {special[turn]} if turn else set()
    return sorted(i for i in found if i is not None and 0 <= i < embeddings)
