"""A stage on several sources: exact fractions of rows, each row from one source, and the same rows after any
interruption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stages import CPU, folders, make_stage, result_bytes
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from liger_convert.config.stages import DistillStage, LearningRates, MixedSeqLen
from liger_convert.data.documents import Document
from liger_convert.data.mixed_rows import BLOCK, MixedDataset, Schedule, mix
from liger_convert.data.packed_rows import IGNORED, collate, pack
from liger_convert.training import rows_of, run_stage
from liger_convert.training.batch_split import split_batch
from liger_convert.utils.errors import BadInput

FIRST = {"text": 0, "chat": 10_000, "own": 20_000}  # the first token of each source
FRACTIONS = {"chat": 0.2, "own": 0.1, "text": 0.7}


def documents(first: int, sizes: Sequence[int] = (37, 101, 5, 64, 300)) -> list[Document]:
    """Documents whose tokens are all different, so that each token tells where it comes from."""
    starts = first + np.cumsum([0, *sizes[:-1]])
    ids = [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes)]
    return [Document(i, np.arange(len(i)) % 3 > 0, len(i)) for i in ids]


TEXTS = {name: documents(first) for name, first in FIRST.items()}


def mixed(rows: int = 500, seq_len: int = 32, seed: int = 3, **options: Any) -> MixedDataset:
    return mix(TEXTS, FRACTIONS, seq_len, rows * seq_len, seed, **options)


def sources_in(item: dict[str, Any]) -> set[str]:
    names = sorted(FIRST, key=FIRST.__getitem__)
    return {names[token // 10_000] for token in item["input_ids"].flatten().tolist()}


def digest(rows: Any) -> str:
    sums = hashlib.sha256()
    for item in rows:
        for name in ("input_ids", "position_ids", "labels"):
            sums.update(item[name].numpy().tobytes())
    return sums.hexdigest()[:16]


def furthest(dealt: Sequence[int], fractions: Sequence[float]) -> float:
    """The largest number of rows by which a source was ever ahead of its fraction, or behind."""
    had_RK = np.cumsum(np.eye(len(fractions))[list(dealt)], axis=0)
    due_RK = np.arange(1, len(dealt) + 1)[:, None] * np.array(fractions)
    return float(abs(had_RK - due_RK).max())


# --- proportions


@pytest.mark.parametrize("seed", range(6))
def test_each_source_has_its_fraction_of_any_number_of_rows_to_within_a_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fractions = rng.dirichlet(np.ones(rng.integers(2, 7)) / 2) + 1e-3
    fractions = (fractions / fractions.sum()).tolist()
    schedule = Schedule(fractions)
    rows = BLOCK + 500  # beyond the first block
    assert furthest([schedule.locate(row)[0] for row in range(rows)], fractions) < 1
    # control: drawing each row's source at random does not do
    assert furthest(rng.choice(len(fractions), rows, p=fractions).tolist(), fractions) > 2


def test_a_sources_rows_are_taken_one_after_the_other_wherever_the_reading_begins() -> None:
    fractions = [0.7, 0.2, 0.1]
    schedule, seen = Schedule(fractions), [0, 0, 0]
    for row in range(BLOCK + 100):
        source, number = schedule.locate(row)
        assert number == seen[source]
        seen[source] += 1
    late = Schedule(fractions)
    assert late.locate(BLOCK + 99) == schedule.locate(BLOCK + 99)
    assert late.locate(7) == schedule.locate(7)


def source_of(rows: MixedDataset, row: int) -> str:
    return rows.names[rows.schedule.locate(row)[0]]


def test_every_row_is_of_one_source_in_the_asked_proportions() -> None:
    for options in ({}, {"concat_documents": True}, {"copy_fraction": 0.5, "concat_documents": True}):
        rows = mixed(**options)
        found = [sources_in(rows[i]) for i in range(len(rows))]
        assert all(names == {source_of(rows, i)} for i, names in enumerate(found))
        for name, fraction in FRACTIONS.items():
            assert abs(sum(names == {name} for names in found) - 500 * fraction) < 1


def test_a_source_that_runs_out_is_read_again_and_it_is_told_how_often() -> None:
    texts = TEXTS | {"own": documents(FIRST["own"], [16, 16])}
    rows = mix(texts, FRACTIONS, 32, 200 * 32)
    own = [i for i in range(200) if source_of(rows, i) == "own"]
    assert len(own) == 20
    assert all(sorted(rows[i]["input_ids"].tolist()) == list(range(20_000, 20_032)) for i in own)
    assert rows.sources["own"].epochs == pytest.approx(20)
    assert rows.sources["text"].epochs == pytest.approx(0.7 * 200 * 32 / 507)
    assert rows.epochs == rows.sources["own"].epochs


# --- the same rows


def test_rows_follow_from_the_seed_and_not_from_the_order_of_the_names() -> None:
    once = digest(mixed(100))
    assert digest(mixed(100)) == once
    assert digest(mixed(100, seed=4)) != once
    stage = {"tokens": 100 * 32, "seq_len": 32, "learning_rates": LearningRates(mixer=1e-3)}
    for names in (("own", "text", "chat"), ("text", "chat", "own")):
        written = DistillStage(data={name: FRACTIONS[name] for name in names}, **stage)
        assert digest(rows_of(written, TEXTS, 3)) == once


def test_a_stage_of_one_source_has_the_rows_that_it_always_had() -> None:
    """The digests were recorded before a stage could have several sources."""
    options: dict[str, Any] = {"copy_fraction": 0.4, "concat_documents": True, "mixed_seq_lens": [(16, 0.3)]}
    stage = DistillStage(
        data="text",
        tokens=64 * 40,
        seq_len=64,
        batch_size=2,
        learning_rates=LearningRates(mixer=1e-3),
        copy_fraction=0.4,
        concat_documents=True,
        mixed_seq_lens=[MixedSeqLen(seq_len=16, fraction=0.3)],
    )
    assert digest(rows_of(stage, TEXTS, 3)) == "1915cf1e03759fdc"
    assert digest(pack(TEXTS["text"], 64, 64 * 40, 3, batch_size=2, **options)) == "1915cf1e03759fdc"
    assert digest(pack(TEXTS["text"], 64, 64 * 40, 3, batch_size=2)) == "b073d08bdff48612"


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_have_the_rows_of_one(processes: int) -> None:
    """The rows of a step, dealt as Trainer deals its batches."""
    stage = make_stage("distill", steps=6, batch=2, accumulation=4)
    rows = mixed(6 * 8, batch_size=2)
    batch_size, accumulation = split_batch(stage, processes)
    batches = list(BatchSampler(SequentialSampler(rows), batch_size, drop_last=True))
    for step in range(6):
        own = [
            batches[(step * accumulation + n) * processes + rank]
            for n in range(accumulation)
            for rank in range(processes)
        ]
        assert sorted(i for batch in own for i in batch) == list(range(8 * step, 8 * step + 8))
    again = mixed(6 * 8, batch_size=2)  # a process of its own, which asks for other rows first
    order = np.random.default_rng(0).permutation(48).tolist()
    theirs = {i: again[i] for i in order}
    assert digest(theirs[i] for i in range(48)) == digest(rows)


def test_a_stage_that_goes_on_reads_on_where_it_stopped() -> None:
    rows = mixed(40)
    assert digest(mixed(40)[i] for i in range(25, 40)) == digest([rows[i] for i in range(40)][25:])


class Stopped(BaseException):
    pass


def test_a_stage_on_a_mix_that_was_stopped_ends_with_the_same_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = {
        name: [Document(rng.integers(3, 101, 40).astype(np.int32), np.ones(40, bool), 40) for _ in range(4)]
        for name in FRACTIONS
    }
    stage = make_stage("distill", steps=6, save_every=2).model_copy(update={"data": FRACTIONS})

    def train(out: Path, stops: float | None = None, **options: Any) -> dict[str, Any]:
        def progress(done: float, total: float | None, note: str = "") -> None:
            if done == stops:
                raise Stopped

        base, model = folders()
        rows = rows_of(stage, options.pop("texts", texts), 0)
        where: dict[str, Any] = {"model_dir": model, "results": (), "base_dir": base, "out": out, "device": CPU}
        return run_stage(stage, dataset=rows, precision="float32", progress=progress, **where, **options)

    stats = train(tmp_path / "through")
    assert stats["sources"]["text"] == {"fraction": 0.7, "epochs": round(0.7 * 6 * 64 / 160, 3)}
    assert stats["epochs"] == stats["sources"]["text"]["epochs"]
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", stops=3)
    train(tmp_path / "stopped", resume=True)
    assert result_bytes(tmp_path / "stopped") == result_bytes(tmp_path / "through")
    train(tmp_path / "other", texts=texts | {"own": texts["text"]})  # control: a tenth of the rows is another text
    assert result_bytes(tmp_path / "other") != result_bytes(tmp_path / "through")


# --- what a stage's other fields mean


def test_rows_of_a_micro_batch_are_of_one_length_and_as_many_are_short_as_asked_for() -> None:
    rows = mixed(800, mixed_seq_lens=[(8, 0.25)], batch_size=4)
    shapes = []
    for batch in DataLoader(rows, batch_size=4, collate_fn=collate):  # items of two lengths could not be put together
        shapes.append(tuple(batch["input_ids"].shape))
    assert set(shapes) == {(4, 32), (16, 8)}
    assert abs(shapes.count((16, 8)) / 200 - 0.25) < 4 * (0.25 * 0.75 / 200) ** 0.5


def test_as_many_rows_of_each_source_repeat_themselves_and_not_the_same_ones() -> None:
    copied, plain = mixed(2000, copy_fraction=0.4), mixed(2000)
    changed: dict[str, list[bool]] = {name: [] for name in FRACTIONS}
    for i in range(2000):
        changed[source_of(plain, i)].append(not copied[i]["input_ids"].equal(plain[i]["input_ids"]))
    for found in changed.values():
        assert abs(np.mean(found) - 0.4) < 4 * (0.24 / len(found)) ** 0.5
    assert changed["chat"][:200] != changed["text"][:200]


def test_with_responses_only_the_labels_follow_each_documents_mask() -> None:
    rows = mixed(60, responses_only=True)
    learned = {int(token): bool(known) for text in TEXTS.values() for d in text for token, known in zip(d.ids, d.loss)}
    for i in range(60):
        ids, labels = rows[i]["input_ids"].tolist(), rows[i]["labels"].tolist()
        positions = rows[i]["position_ids"].tolist()
        assert [label != IGNORED for label in labels] == [learned[t] and p > 0 for t, p in zip(ids, positions)]


def test_too_little_is_refused() -> None:
    with pytest.raises(BadInput, match="31 tokens do not fill one row of 32"):
        mix(TEXTS, FRACTIONS, 32, 31)
    with pytest.raises(IndexError):
        mixed(10)[10]
    assert torch.equal(mixed(10).whole(9)["input_ids"], mixed(10)[9]["input_ids"])
