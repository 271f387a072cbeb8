"""Stages of training small enough for a test: their recipes, a model between two kinds of layers, and its documents."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import shared_folder
from tiny import save_tiny_base

from liger_convert.config.stages import AlignStage, DistillStage, FinetuneStage, LearningRates, Lora, Stage
from liger_convert.data.documents import Document
from liger_convert.data.packed_rows import pack
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base
from liger_convert.training import run_stage

SEQ_LEN = 32
CPU = torch.device("cpu")
FULL = LearningRates(mixer=1e-2, attention=5e-3, body=2e-3, embeddings=1e-3)
STAGES: dict[str, dict[str, Any]] = {
    "align": {"kind": AlignStage, "learning_rates": LearningRates(mixer=1e-2, attention=1e-2)},
    "distill": {"kind": DistillStage, "learning_rates": FULL, "ce_weight": 0.3, "temperature": 2.0},
    "finetune": {"kind": FinetuneStage, "learning_rates": FULL},
    "lora": {
        "kind": FinetuneStage,
        "learning_rates": LearningRates(mixer=1e-2, lora=2e-2),
        "lora": Lora(rank=4, dropout=0.1),
    },
}
MIXERS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla"},
    "shifted": {"type": "forgetting", "kv_shift": True, "qk_norm": True, "output_gate": True},
}
every_stage = pytest.mark.parametrize("name", STAGES)


def make_stage(name: str, *, steps: int = 8, batch: int = 2, accumulation: int = 1, **changes: Any) -> Stage:
    fields = STAGES[name] | changes
    kind = fields.pop("kind")
    shape = {"seq_len": SEQ_LEN, "batch_size": batch, "grad_accumulation": accumulation}
    return kind(data="text", tokens=steps * SEQ_LEN * batch * accumulation, **shape, **fields)


def folders(family: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """A tiny base and its linearized model, with a softmax layer between two linear ones. changes: of its config, and
    `mixer`, one of MIXERS."""
    return _folders(family, tuple(sorted(changes.items())))


@functools.cache
def _folders(family: str, changes: tuple[tuple[str, Any], ...]) -> tuple[Path, Path]:
    folder, of_config = shared_folder("liger-test"), dict(changes)
    spec = resolve_spec({"window": 6, "sinks": 2, **MIXERS[of_config.pop("mixer", "gla")]}, "mixer")
    base = save_tiny_base(family, folder / "base", tokenizer=False, **of_config)
    linearization = {"format": 2, "mixers": {"main": spec}, "layers": ["main", "softmax", "main"]}
    linearize_base(base, linearization).save_pretrained(folder / "linearized")
    return base, folder / "linearized"


@functools.cache
def documents() -> list[Document]:
    """Few and alike, so that a few steps learn them."""
    rng = np.random.default_rng(0)
    pattern = rng.integers(3, 101, 9)
    made = []
    for size in rng.integers(10, 60, 12):
        ids = np.resize(pattern, size).astype(np.int32)
        made.append(Document(ids, np.arange(size) >= size // 3, int(size)))
    return made


def train(
    stage: Stage,
    out: Path,
    *,
    family: str = "llama",
    changes: Any = None,
    model: Path | None = None,
    precision: str = "float32",
    results: Any = (),
    device: torch.device = CPU,
    **options: Any,
) -> dict[str, Any]:
    base, linearized = folders(family, **(changes or {}))
    masked = isinstance(stage, FinetuneStage) and not stage.concat_documents
    cut = {
        "mixed_seq_lens": [(other.seq_len, other.fraction) for other in stage.mixed_seq_lens],
        "batch_size": stage.batch_size,
    }
    packed = pack(
        documents(), SEQ_LEN, stage.tokens, responses_only=masked, concat_documents=stage.concat_documents, **cut
    )
    return run_stage(
        stage,
        model_dir=model or linearized,
        results=results,
        base_dir=base,
        dataset=packed,
        out=out,
        device=device,
        precision=precision,
        **options,
    )


def files_of(out: Path) -> list[Path]:
    return sorted((out / "result").rglob("*.safetensors"))


def result_bytes(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files_of(out)}
