"""Text written by the base: the right amount, sampled as asked for, and the same after any interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import closing_tokenizer, save_tiny_base, tiny_tokenizer
from transformers import GenerationConfig

from liger_convert.config.sources import TeacherSource
from liger_convert.data import teacher
from liger_convert.data.documents import Document, load_source
from liger_convert.data.sampling import Sampler
from liger_convert.model import placing
from liger_convert.model.loading import load_base
from liger_convert.utils.errors import BadInput, LinearizeError

CPU = torch.device("cpu")
BOS, EOS = 1, 2
GREEDY = 1e-9  # a nucleus so small that it holds one token


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose generation settings would sample differently, and whose tokenizer has a token for the beginning."""
    folder = save_tiny_base("llama", tmp_path_factory.mktemp("base"))
    settings = {"temperature": 9.0, "repetition_penalty": 5.0, "max_length": 7, "suppress_tokens": [EOS]}
    GenerationConfig(do_sample=True, eos_token_id=EOS, **settings).save_pretrained(folder)
    return folder


def source(**fields: Any) -> TeacherSource:
    return TeacherSource(**{"tokens": 530, "document_tokens": 24, "batch_size": 4} | fields)


def write(base: Path, path: Path, asked: TeacherSource, tokenizer: Any = None, **options: Any) -> np.ndarray:
    prompts = teacher.encode_prompts(asked, tokenizer or tiny_tokenizer())
    teacher.write(asked, path, prompts=prompts, base_dir=base, device=CPU, precision="float32", **options)
    return np.fromfile(path, "<u4").reshape(-1, asked.document_tokens)


def continued(base: Path, prompt: list[int], tokens: int) -> list[int]:
    """The likeliest continuation, one token at a time, with no cache."""
    model, ids = load_base(base, CPU, torch.float32), list(prompt)
    while len(ids) < tokens:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


def test_documents_are_as_many_and_as_long_as_asked_for_and_follow_the_seed(base: Path, tmp_path: Path) -> None:
    ids_NT = write(base, tmp_path / "a", source(), seed=1)
    assert ids_NT.shape == (530 // 24, 24)
    assert (ids_NT[:, 0] == BOS).all()
    assert len({tuple(ids) for ids in ids_NT}) == len(ids_NT)
    assert (write(base, tmp_path / "b", source(), seed=1) == ids_NT).all()
    assert (write(base, tmp_path / "c", source(), seed=2) != ids_NT).any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("parts", [2, 3, 9])
def test_parts_make_the_text_that_one_process_writes(base: Path, tmp_path: Path, parts: int) -> None:
    """22 documents in 6 batches; of 9 parts some are empty. Nothing that a killed call left beside them stays."""
    asked = source(prompt=["a", "a much longer one", "of words"])
    whole_NT = write(base, tmp_path / "whole", asked)
    path, prompts = tmp_path / "a", teacher.encode_prompts(asked, tiny_tokenizer())
    (tmp_path / "a.1-of-99").write_bytes(b"of another number of processes")
    for part in range(parts):
        options = {"base_dir": base, "device": CPU, "precision": "float32", "part": (part, parts)}
        teacher.write(asked, path, prompts=prompts, **options)
        assert not path.exists()
    teacher.join(path, parts)
    assert (np.fromfile(path, "<u4").reshape(-1, 24) == whole_NT).all()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "whole"]
    teacher.join(path, parts)  # an attempt that was killed just before it was recorded


def test_the_end_of_a_text_does_not_end_a_document(base: Path, tmp_path: Path) -> None:
    ids_NT = write(base, tmp_path / "a", source(tokens=24 * 99, batch_size=99))
    ends = np.argwhere(ids_NT[:, 1:-1] == EOS)
    assert len(ends)
    assert len({tuple(ids_NT[row, at + 2 :]) for row, at in ends}) > 1


def test_tokens_are_drawn_from_the_bases_own_distribution(base: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        logits_V = load_base(base, CPU, torch.float32)(torch.tensor([[BOS]])).logits[0, -1].double()
    for temperature in (1.0, 0.5):
        asked = source(tokens=2 * 4000, document_tokens=2, batch_size=2000, temperature=temperature)
        drawn_V = np.bincount(write(base, tmp_path / str(temperature), asked)[:, 1], minlength=101)
        expected_V = 4000 * (logits_V / temperature).softmax(-1).numpy()
        # each count is binomial: 5 deviations in none of 101 cases, and 1 more for the rarest
        assert (abs(drawn_V - expected_V) < 5 * np.sqrt(expected_V) + 1).all()


def test_prompts_take_turns_and_are_continued_whatever_their_lengths(base: Path, tmp_path: Path) -> None:
    texts = ["a", "a much longer one", "of words"]
    ids_NT = write(base, tmp_path / "a", source(prompt=texts, top_p=GREEDY))
    expected = [continued(base, tiny_tokenizer()(text)["input_ids"], 24) for text in texts]
    assert [ids.tolist() for ids in ids_NT] == [expected[i % 3] for i in range(22)]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_cache_of_fixed_size_writes_the_likeliest_tokens(base: Path, fixed: bool) -> None:
    """This is what a GPU does, where steps are captured. Prompts of other lengths and smaller batches follow one
    another."""
    sampler = Sampler(load_base(base, CPU, torch.float32), 24, 1.0, GREEDY, fixed=fixed)
    prompts = [[BOS], [5, 9, 11, 4], [7, 8]]
    for batch in (prompts, prompts[::-1], prompts[:1]):
        made_BT = sampler(batch, [(0, i) for i in range(len(batch))])
        assert made_BT.tolist() == [continued(base, prompt, 24) for prompt in batch]


def test_a_base_whose_logits_are_no_numbers_writes_nothing(base: Path) -> None:
    damaged = load_base(base, CPU, torch.float32)
    damaged.model.norm.weight.data[0] = float("nan")
    with pytest.raises(LinearizeError, match="the logits of the base are not finite"):
        Sampler(damaged, 24, 1.0, 1.0)([[BOS]], [(0, 0)])


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_a_base_that_a_gpu_cannot_hold_writes_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Some layers stay in host memory. gemma2 uses one tensor as both its embeddings and its output head."""
    folder = save_tiny_base(family, tmp_path / family)
    made = [write(folder, tmp_path / "whole", source(tokens=99))]
    assert "wait" not in capsys.readouterr().err
    size = sum(parameter.nbytes for parameter in load_base(folder, CPU, torch.float32).parameters())
    monkeypatch.setattr(placing, "free_memory", lambda device: int(0.8 * size / placing.SHARE))
    made.append(write(folder, tmp_path / "parts", source(tokens=99)))
    assert "of the model's" in capsys.readouterr().err
    made.append(write(folder, tmp_path / "other", source(tokens=99), seed=1))
    assert (made[0] == made[1]).all()
    assert (made[0] != made[2]).any()


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3", "olmoe"])
def test_a_fixed_cache_writes_what_a_growing_one_does_in_every_kind_of_base(family: str, tmp_path: Path) -> None:
    model = load_base(save_tiny_base(family, tmp_path / family), CPU, torch.float32)
    seeds = [(3, i) for i in range(4)]
    growing, fixed = (Sampler(model, 40, 1.0, 0.9, fixed=fixed) for fixed in (False, True))
    prompts = [[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]]
    assert (growing(prompts, seeds) == fixed(prompts, seeds)).all()
    assert (growing(prompts, seeds) != fixed(prompts, seeds[::-1])).any()


def test_how_many_are_written_at_a_time_changes_nothing(base: Path, tmp_path: Path) -> None:
    one = write(base, tmp_path / "one", source(batch_size=1))
    assert (write(base, tmp_path / "many", source(batch_size=22)) == one).all()


def test_a_batch_without_room_is_halved(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tried, real = [], Sampler.__call__

    def cramped(self: Sampler, prompts: list[list[int]], seeds: Any) -> np.ndarray:
        tried.append(len(prompts))
        if len(prompts) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, prompts, seeds)

    whole = write(base, tmp_path / "whole", source())
    monkeypatch.setattr(Sampler, "__call__", cramped)
    limit = 3
    assert (write(base, tmp_path / "a", source(batch_size=16)) == whole).all()
    assert tried == [16, 8, 4, *[2] * 11]
    assert "room for fewer documents at a time: 2" in capsys.readouterr().err
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        write(base, tmp_path / "b", source())


# --- text of another source, continued


def texts(*sizes: int) -> list[Document]:
    return [
        Document(np.arange(3, 3 + size, dtype=np.int32) + i, np.ones(size, bool), size) for i, size in enumerate(sizes)
    ]


def test_documents_begin_as_those_of_another_source_do(base: Path, tmp_path: Path) -> None:
    asked = source(prompts="text", prompt_tokens=5)
    prompts = teacher.beginnings(asked, texts(9, 5, 30, 6, 2), seed=1)
    assert sorted(prompts) == [[3, 4, 5, 6, 7], [5, 6, 7, 8, 9], [6, 7, 8, 9, 10]]  # those of more than 5 tokens
    assert teacher.beginnings(asked, texts(9, 5, 30, 6, 2), seed=1) == prompts
    many = texts(*[30] * 50)
    assert len(teacher.beginnings(asked, many, seed=1)) == asked.documents
    assert teacher.beginnings(asked, many, seed=1) != teacher.beginnings(asked, many, seed=2)
    teacher.write(asked, tmp_path / "a", prompts=prompts, base_dir=base, device=CPU, precision="float32")
    ids_NT = np.fromfile(tmp_path / "a", "<u4").reshape(-1, 24)
    assert [ids[:5].tolist() for ids in ids_NT] == [prompts[i % 3] for i in range(22)]
    assert len({tuple(ids) for ids in ids_NT}) == 22  # one beginning goes on in many ways
    with pytest.raises(
        BadInput, match=r"no document of text has more than 5 tokens \(prompt_tokens\); the longest has 4"
    ):
        teacher.beginnings(asked, texts(4, 3), seed=1)


def test_of_a_chat_the_base_gives_the_first_response() -> None:
    (chat,) = texts(20)
    chat.loss[:6] = chat.loss[10:15] = False  # the questions
    assert teacher.beginnings(source(prompts="chat", prompt_tokens=12), [chat], seed=0) == [[3, 4, 5, 6, 7, 8]]
    assert teacher.beginnings(source(prompts="chat", prompt_tokens=4), [chat], seed=0) == [[3, 4, 5, 6]]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("torn", [b"", b"half a batch"])
def test_writing_that_was_killed_goes_on_and_ends_with_the_same_bytes(base: Path, tmp_path: Path, torn: bytes) -> None:
    whole = write(base, tmp_path / "whole", source(prompt=["a", "bcd", "ef"]))

    def kill(done: float, total: float | None, note: str = "") -> None:
        if done >= 24 * 12:
            raise Killed

    asked, path, seen = source(prompt=["a", "bcd", "ef"]), tmp_path / "killed", []
    with pytest.raises(Killed):
        write(base, path, asked, progress=kill)
    assert not path.exists()
    with open(tmp_path / "killed.partial", "ab") as file:
        file.write(torn)
    again = write(base, path, asked, progress=lambda done, total, note="": seen.append((done, total)))
    assert (again == whole).all()
    assert seen == [(24 * 16, 528), (24 * 20, 528), (24 * 22, 528)]
    assert not (tmp_path / "killed.partial").exists()


def test_what_is_written_is_not_written_again(base: Path, tmp_path: Path) -> None:
    ids_NT = write(base, tmp_path / "a", source())
    assert (write(tmp_path / "no base", tmp_path / "a", source(), seed=5) == ids_NT).all()


def test_documents_hold_out_the_first_ones_and_no_text_is_on_both_sides(base: Path, tmp_path: Path) -> None:
    asked = source(held_out=0.2, prompt=["a", "b"])
    ids_NT = write(base, tmp_path / "a", asked)
    documents = load_source(asked, tiny_tokenizer(), written=tmp_path / "a")
    assert asked.held_out_documents == len(documents.held_out) == 4
    found = [*documents.held_out, *documents.train]
    assert [document.ids.tolist() for document in found] == ids_NT.tolist()
    assert all(document.loss.all() and document.ids.dtype == np.int32 for document in found)
    same = source(held_out=0.1, top_p=GREEDY)
    write(base, tmp_path / "same", same)
    with pytest.raises(BadInput, match="teacher has too few documents"):
        load_source(same, tiny_tokenizer(), written=tmp_path / "same")


def test_a_file_of_other_text_is_refused(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "a", source())
    with pytest.raises(BadInput, match="a: has 528 tokens, which is not what the recipe asks for"):
        load_source(source(tokens=1000), tiny_tokenizer(), written=tmp_path / "a")


def test_without_a_prompt_a_special_token_begins_a_document() -> None:
    tokenizer = tiny_tokenizer()
    assert teacher.encode_prompts(source(), tokenizer) == [[BOS]]
    tokenizer.bos_token = None
    assert teacher.encode_prompts(source(), tokenizer) == [[tokenizer.all_special_ids[0]]]
    tokenizer.eos_token = tokenizer.pad_token = None
    with pytest.raises(BadInput, match="no special token to begin a document with"):
        teacher.encode_prompts(source(), tokenizer)


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(BadInput, match="prompt 'xxxxxxxxxxxxxxxxxxxxxxxx' takes 24 tokens of a document of 24"):
        teacher.encode_prompts(source(prompt=["a", "x" * 24]), tiny_tokenizer())


def test_a_prompt_is_without_the_end_that_the_tokenizer_puts_behind_every_text() -> None:
    asked = source(prompt=["abc", "d"])
    assert teacher.encode_prompts(asked, closing_tokenizer()) == teacher.encode_prompts(asked, tiny_tokenizer())
