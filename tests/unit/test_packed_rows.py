"""Documents become rows that keep them apart, and some rows repeat themselves."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import closing_tokenizer, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from liger_convert.config.sources import FileSource
from liger_convert.data.documents import Document, load_source
from liger_convert.data.mixed_rows import mix
from liger_convert.data.packed_rows import IGNORED, RANDOM_COPIES, collate, pack
from liger_convert.utils.errors import BadInput


def documents(*sizes: int) -> list[Document]:
    """Documents whose tokens are all different, so that each token tells where it comes from."""
    starts = np.cumsum([0, *sizes[:-1]])
    ids = [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes)]
    return [Document(i, np.arange(len(i)) % 3 > 0, len(i)) for i in ids]


def begun(docs: list[Document], bos: int) -> list[Document]:
    """The same documents behind a BOS token."""
    return [
        Document(np.insert(d.ids, 0, bos).astype(np.int32), np.insert(d.loss, 0, False), d.text_bytes, begin=1)
        for d in docs
    ]


def test_documents_know_whether_they_begin_with_the_bos_token_of_the_tokenizer(tmp_path: Path) -> None:
    """Not with one that only the chat template has, as SmolLM2's <|im_start|>: plain text is without it."""
    text, chat = tmp_path / "text.jsonl", tmp_path / "chat.jsonl"
    text.write_text('{"text": "An apple is a fruit."}\n')
    turns = [{"role": "user", "content": "What is an apple?"}, {"role": "assistant", "content": "A fruit."}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    template = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"

    def begins(tokenizer: Any) -> list[int]:
        sources = FileSource(path=str(text), held_out=0), FileSource(path=str(chat), format="messages", held_out=0)
        return [load_source(source, tokenizer).train[0].begin for source in sources]

    plain, adds = tiny_tokenizer(), tiny_tokenizer()
    plain.chat_template = adds.chat_template = template
    assert begins(plain) == [0, 0]
    adds.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert begins(adds) == [1, 1]
    adds.chat_template = template.replace("<s>", "")
    assert begins(adds) == [1, 0]
    two = [("<pad>", 0), ("<s>", 1)]
    adds.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> <s> $A", special_tokens=two)
    assert begins(adds) == [2, 0]
    adds.bos_token = None
    assert begins(adds) == [2, 0]
    closes = closing_tokenizer()
    closes.bos_token, closes.chat_template = "</s>", template
    assert begins(closes) == [0, 0], "it is behind every text, not before it"


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
        labeled = (item["labels"] != IGNORED).numpy()
        assert (labeled == learned_token[item["input_ids"]] & (item["position_ids"].numpy() > 0)).all()


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


@pytest.mark.parametrize("options", [{}, {"concat_documents": True}, {"responses_only": True}, {"copy_fraction": 1.0}])
def test_every_row_begins_with_the_bos_token_of_its_first_document(options: dict[str, Any]) -> None:
    docs = begun(documents(5, 11, 3, 40, 9), 99)
    packed = pack(docs, 16, tokens=16 * 60, mixed_seq_lens=[(8, 0.5)], batch_size=1, **options)
    continued = 0
    for i, item in enumerate(collate([packed[i]]) for i in range(len(packed))):
        assert (item["input_ids"][:, 0] == 99).all()
        assert (item["labels"][:, 0] == IGNORED).all()
        for piece, ids_T in enumerate(item["input_ids"].tolist()):
            row, inside = divmod(i * 16 + piece * len(ids_T), packed.tokens)
            order, ends = packed._epoch(row)
            which = int(np.searchsorted(ends, inside, side="right"))
            before = inside - int(ends[which]) + len(docs[order[which]].ids)
            continued += before > 0
            if "copy_fraction" not in options:
                text = docs[order[which]].ids[before:].tolist()[1 : len(ids_T)]
                assert ids_T[1 : 1 + len(text)] == text
    assert continued > 20


def test_every_row_begins_with_all_tokens_that_the_tokenizer_puts_before_a_text() -> None:
    """Two for GLM-4; none of them is to be predicted where it stands in the place of a token of the text."""
    docs = [replace(document, begin=2) for document in begun(begun(documents(40, 21, 30), 98), 97)]
    for item in pack(docs, 16, tokens=16 * 40, concat_documents=True):
        ids = item["input_ids"].tolist()
        replaced = 2 if ids[:2] == [97, 98] else 1  # of a document's last token, only one can be
        assert ids[0] == 97
        assert item["labels"][:replaced].tolist() == replaced * [IGNORED]
        assert item["labels"][replaced:].tolist() == ids[replaced:]
    for item in pack(
        [replace(d, begin=2) for d in begun(begun(documents(4000), 99_998), 99_997)], 64, copy_fraction=1.0
    ):
        assert (item["input_ids"] >= 99_997).tolist() == [True, True] + 62 * [False]


def test_the_bos_token_is_neither_copied_nor_overwritten() -> None:
    for item in pack(begun(documents(4000), 99_999), 64, copy_fraction=1.0, tokens=64 * 50, seed=5):
        assert (item["input_ids"] == 99_999).tolist() == [True] + 63 * [False]
    assert [len(set(item["input_ids"].tolist())) for item in pack(begun(documents(9), 9), 2, copy_fraction=1.0)] == [
        2
    ] * 5


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
    """600 rows, 0.4 of which repeat themselves, and the same rows without repetition."""
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


@pytest.mark.parametrize("sizes", [(40,), (3, 1, 7), (16, 32, 5, 16), (1, 1, 1, 20, 2)])
@pytest.mark.parametrize("length", [16, 8])
def test_the_documents_of_the_fullest_row_are_counted(sizes: tuple[int, ...], length: int) -> None:
    """Also if rows hold the whole text more than once."""
    packed = pack(documents(*sizes), 16, 16 * 9, mixed_seq_lens=[(length, 1.0)] if length < 16 else [], batch_size=1)
    counts = [
        1 + int((piece_T.diff() != 1).sum())
        for row in range(len(packed))
        for piece_T in packed[row]["position_ids"].view(-1, length)
    ]
    most = packed.most_documents()
    assert most == max(counts) if length == 16 else most >= max(counts)


def test_the_documents_of_the_fullest_row_of_a_mix_are_counted() -> None:
    mixed = mix({"long": documents(90), "short": documents(2, 3, 4)}, {"long": 0.5, "short": 0.5}, 16, 16 * 8)
    assert mixed.most_documents() == max(1 + int((mixed[i]["position_ids"].diff() != 1).sum()) for i in range(8))


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
