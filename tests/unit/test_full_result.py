"""A checkpoint that is written one tensor at a time equals the one that transformers writes of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stages import folders
from torch import Tensor

from liger_convert.io.checkpoint import WEIGHTS
from liger_convert.model.loading import load_linearized
from liger_convert.model.shards import Entry, write_file
from liger_convert.training import full_result
from liger_convert.training.full_result import write_model
from liger_convert.training.merge import Chain


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_result_has_the_tensors_of_a_saved_model(
    family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is larger than allowed. Experts are stored separately, and of tied weights only one is stored."""
    monkeypatch.setattr(full_result, "SHARD", 20_000)
    model = load_linearized(folders(family, tie_word_embeddings=tied)[1], dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    write_model(model, tmp_path / "written")
    assert equal(stored(tmp_path / "written"), stored(tmp_path / "saved"))
    assert equal(load_linearized(tmp_path / "written").state_dict(), model.state_dict())
    sizes = [sum(x.nbytes for x in load_file(path).values()) for path in (tmp_path / "written").glob("*.safetensors")]
    largest = max(p.nbytes for p in model.parameters())
    assert len(sizes) > 2
    assert max(sizes) <= max(20_000, largest)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_is_not_trained_is_read_where_the_stage_began(family: str, fused: bool, tmp_path: Path) -> None:
    """A sharded model holds these weights in lower precision. fused: the checkpoint stores experts as the model does.
    The control writes the model's own values."""
    start = folders(family)[1]
    model: Any = load_linearized(start, dtype=torch.float32)
    if fused:
        start = tmp_path / "start"
        start.mkdir()
        tensors = dict(model.named_parameters())
        write_file(start / WEIGHTS, Entry.of(tensors), tensors.values())
        model.config.save_pretrained(start)
    before = stored(folders(family)[1])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." not in name)
        parameter.data = (parameter.data + 1).bfloat16()
    write_model(model, tmp_path / "written", Chain(start))
    written = stored(tmp_path / "written")
    assert written.keys() == before.keys()
    same = {name for name, x in written.items() if torch.equal(x, before[name])}
    assert same == {name for name in before if ".mlp." in name or ".block_sparse_moe." in name}
    assert {x.dtype for x in written.values()} == {torch.float32}
    write_model(model, tmp_path / "control")
    assert not any(torch.equal(x, before[name]) for name, x in stored(tmp_path / "control").items())


def test_a_model_that_every_process_holds_is_written_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, frozen weights come from where the stage began, also if weights are not sharded. The other processes
    then do not help, so that the first would wait for them forever."""

    def waits() -> None:
        raise AssertionError("waited for the other processes")

    monkeypatch.setattr(full_result.processes, "barrier", waits)
    linearized = folders()[1]
    write_model(load_linearized(linearized), tmp_path / "written", Chain(linearized))
    assert equal(stored(tmp_path / "written"), stored(linearized))
