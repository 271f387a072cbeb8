"""A .gguf base in parts is the base in one file, and of every type it is what the package gguf makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import SAMPLE, write_gguf
from safetensors.torch import load_file
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM

from liger_convert.io.checkpoint import base_config, load_tokenizer, resolve_base
from liger_convert.io.gguf_parts import parts_of
from liger_convert.pipeline.steps import _parts
from liger_convert.utils.errors import BadInput

UNREADABLE = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_tiny_base("llama", tmp_path_factory.mktemp("llama"))).eval()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One whose rows are as long as a block of the types with the longest."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_pretrained(save_tiny_base("llama", tmp_path_factory.mktemp("wide"), **sizes))


@pytest.mark.parametrize("named", [1, 3])
def test_a_model_in_parts_is_the_model_in_one_file(model: Any, named: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", model)
    write_gguf(tmp_path / "whole.gguf", model, parts=3)
    part = str(tmp_path / f"whole-0000{named}-of-00003.gguf")
    one = resolve_base(str(tmp_path / "whole.gguf"), tmp_path / "one")
    joined = resolve_base(part, tmp_path / "parts")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (one / name).read_bytes() == (joined / name).read_bytes()
    load_tokenizer(joined)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["base"]
    whole = str(tmp_path / "whole.gguf")
    assert base_config(part).to_diff_dict() == base_config(whole).to_diff_dict()


def test_all_parts_are_inputs_of_a_run(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", model, parts=3)
    parts = sorted(tmp_path.iterdir())
    assert list(_parts("base", parts[1]).values()) == parts == parts_of(parts[0])
    assert _parts("base", tmp_path) == {"base": tmp_path}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda parts: parts[1].unlink(), r"m-00002-of-00003\.gguf: this part of m-00001-of-00003\.gguf is missing"),
        (lambda parts: parts[2].rename(parts[1]), r"m-00003-of-00003\.gguf: this part .* is missing; put all 3"),
        (
            lambda parts: parts[1].write_bytes(parts[2].read_bytes()),
            r"m-00002-of-00003\.gguf: says that it is part 3 of 3, but by its name is 2 of 3; .*gguf-split --merge",
        ),
        (lambda parts: parts[2].write_bytes(b"GGUF"), r"m-00003-of-00003\.gguf: cannot be read as a GGUF model"),
    ],
    ids=["missing", "renamed", "exchanged", "broken"],
)
def test_parts_that_do_not_make_a_model_are_refused(model: Any, tmp_path: Path, change: Any, says: str) -> None:
    write_gguf(tmp_path / "m.gguf", model, parts=3)
    change(sorted(tmp_path.iterdir()))
    for use in (lambda s: resolve_base(s, tmp_path / "work"), base_config):
        with pytest.raises(BadInput, match=says):
            use(str(tmp_path / "m-00001-of-00003.gguf"))
    assert not (tmp_path / "work").exists()


def test_a_part_under_another_name_is_refused(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model, parts=2)
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "m.gguf")
    with pytest.raises(BadInput, match=r"m\.gguf: says that it is part 1 of 2, but by its name is 1 of 1; give it its"):
        resolve_base(str(tmp_path / "m.gguf"), tmp_path / "work")


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_every_type_is_read_or_refused_before_any_work(wide: Any, kind: Kind, tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "model.gguf", wide, kind=kind)
    if kind.name in UNREADABLE:
        for use in (lambda s: resolve_base(s, tmp_path / "work"), base_config):
            with pytest.raises(
                BadInput, match=rf"tensor blk\.0\.\S+ is of type {kind.name}, which .*; give one of F32, "
            ):
                use(str(tmp_path / "model.gguf"))
        assert not (tmp_path / "work").exists()
        return
    made = load_file(resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work") / "model.safetensors")
    expected = torch.from_numpy(gguf.dequantize(stored[SAMPLE], kind).copy())
    assert made[SAMPLE].dtype == torch.float32
    assert torch.equal(made[SAMPLE], expected)
