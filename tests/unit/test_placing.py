"""A model that does not fit on the GPU, so that some layers stay in host memory, gives the same output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from stages import folders, make_stage, result_bytes, train
from tiny import tiny_tokenizer
from tiny_models import GREEDY, PADDED, PADDED_MASK, TOKENS, base_folder, build, linearization, logits

from liger_convert.config.stages import LearningRates, Lora
from liger_convert.data.documents import Document
from liger_convert.eval.ablation import BRANCHES
from liger_convert.model import placing, set_branches
from liger_convert.model.loading import linearize_base, load_pretrained
from liger_convert.model.placing import SHARE, place
from liger_convert.pipeline import stage_check
from liger_convert.training import stage as stage_module
from liger_convert.utils.errors import BadInput

DEVICE = torch.device("cpu")


def size(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def waiting(model: Any) -> set[str]:
    """The layers whose weights are not on the device."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    return {name.split(".")[2] for name in names if name.startswith("model.layers.")}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Places a model as on a GPU that has room for a fraction of the model's weights."""

    def placed(model: Any, part: float) -> Any:
        monkeypatch.setattr(placing, "free_memory", lambda device: int(part * size(model) / SHARE))
        return place(model, DEVICE)

    return placed


@pytest.mark.parametrize("family", ["stablelm", "starcoder2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_run_under_autocast_on_a_cpu(family: str, dtype: torch.dtype) -> None:
    tokens = TOKENS[:, :20]  # as many as every window sees
    expected = logits(load_pretrained(base_folder(family), dtype=torch.float32), tokens)
    for layers in (["softmax"] * 3, ["main"] * 3):
        model = linearize_base(base_folder(family), linearization(layers, window=32), dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = logits(place(model, DEVICE), tokens).float()
        assert (found - expected).norm() < 0.1 * expected.norm()


def model_of(family: str, mixer: str) -> Any:
    return build(family, ["main", "softmax", "main"], type=mixer, window=5)


@pytest.mark.parametrize(
    ("family", "mixer"), [("llama", "gla"), ("llama", "mom"), ("gemma2", "gla"), ("mixtral", "gated-deltanet")]
)
def test_layers_in_host_memory_do_not_change_the_output(family: str, mixer: str, small: Any, capsys: Any) -> None:
    """gemma2 uses one tensor as both its embeddings and its output head."""
    whole, options = model_of(family, mixer), GREEDY | {"attention_mask": PADDED_MASK, "max_new_tokens": 8}
    expected, text = logits(whole, TOKENS), whole.generate(PADDED, **options)
    model = small(model_of(family, mixer), 0.8)
    assert waiting(model)
    assert waiting(model) < {"0", "1", "2"}
    assert not model.get_input_embeddings().weight.is_meta
    assert not model.get_output_embeddings().weight.is_meta
    assert re.search(r"note: .* of the model's .* stay in host memory", capsys.readouterr().err)
    assert torch.equal(logits(model, TOKENS), expected)
    assert torch.equal(model.generate(PADDED, **options), text)
    set_branches(model, BRANCHES["memory_ablated"])
    assert not torch.equal(logits(model, TOKENS), expected)


def test_a_model_that_fits_is_in_one_piece(small: Any, capsys: Any) -> None:
    model = small(model_of("llama", "gla"), 1.1)  # and its buffers
    assert not waiting(model)
    assert not hasattr(model, "hf_device_map")
    assert "note" not in capsys.readouterr().err


def test_a_gpu_without_room_for_a_layer_is_refused(small: Any) -> None:
    with pytest.raises(BadInput, match=r"device: the GPU has .* too little for the embeddings, the head and one layer"):
        small(model_of("llama", "gla"), 0.2)


LEARNED: dict[str, dict[str, Any]] = {
    "align": {"calibrate": True},
    "distill": {},
    "distill-concat": {"concat_documents": True},
    "distill-lora": {"lora": Lora(rank=4), "learning_rates": LearningRates(mixer=1e-2, lora=2e-2)},
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_stage_learns_the_same_of_a_teacher_whose_layers_wait(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The GPU has no room for the teacher in addition to what is trained. The control has another teacher."""
    stage = make_stage(name.partition("-")[0], steps=2, **LEARNED[name])
    whole = train(stage, tmp_path / "whole", precision=precision)
    assert "wait" not in capsys.readouterr().err
    teacher = load_pretrained(folders()[0], dtype=getattr(torch, precision))
    taken: list[int] = []

    def place_in_part(model: Any, device: torch.device, **options: Any) -> Any:
        taken.append(options["taken"])
        monkeypatch.setattr(placing, "free_memory", lambda device: options["taken"] + int(0.8 * size(teacher)))
        return place(model, device, **options)

    monkeypatch.setattr(stage_module, "place", place_in_part)
    parts = train(stage, tmp_path / "parts", precision=precision)
    assert "of the model's" in capsys.readouterr().err
    assert taken[0] > size(teacher)  # float32 weights and gradients, for one
    assert result_bytes(tmp_path / "parts") == result_bytes(tmp_path / "whole")
    assert parts["loss"] == whole["loss"]

    def other(model: Any, device: torch.device, **options: Any) -> Any:
        with torch.no_grad():
            model.model.layers[-1].self_attn.o_proj.weight.mul_(1.5)
        return place_in_part(model, device, **options)

    monkeypatch.setattr(stage_module, "place", other)
    assert train(stage, tmp_path / "other", precision=precision)["loss"] != whole["loss"]


def test_a_teacher_does_not_wait_where_the_training_alone_has_no_room(small: Any, capsys: Any) -> None:
    whole = place(model_of("llama", "gla"), DEVICE, share=1.0, taken=1 << 60)
    assert not waiting(whole)
    model, free = model_of("llama", "gla"), 1 << 24
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "free_memory", lambda device: free)
        assert not waiting(place(model, DEVICE, share=1.0, taken=free + 1))
        with pytest.raises(
            BadInput, match=r"too little for the embeddings, the head and one layer beside the 16\.8 MB that"
        ):
            place(model, DEVICE, share=1.0, taken=free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_check_measures_the_same(dtype: torch.dtype, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a base and of a linearized model, and in bfloat16 without a copy of each weight that came."""
    tokenizer, generator = tiny_tokenizer(), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 101, (600,), generator=generator).int().numpy()
    documents = [Document(ids, ids > 0, len(ids))]
    amount = stage_check.Size(2, 48, 2, 20, 2)
    precision = str(dtype).removeprefix("torch.")

    def measured(model: Any) -> Any:
        return stage_check.measure(model, tokenizer, documents, amount, DEVICE, precision, lambda *_: None)

    def load(kind: str) -> Any:
        if kind == "base":
            return load_pretrained(base_folder("llama"), dtype=dtype)
        return linearize_base(base_folder("llama"), linearization(type="gla", window=5), dtype=dtype)

    for kind in ("base", "linearized"):
        expected, model = measured(load(kind)), load(kind)
        part = int(0.8 * size(model) / SHARE)
        with monkeypatch.context() as patch:
            patch.setattr(placing, "free_memory", lambda device, part=part: part)
            assert measured(model) == expected
        assert waiting(model)
        assert not any(parameter.requires_grad for parameter in model.parameters())
