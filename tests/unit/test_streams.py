"""Commands that go from file to file hold a tensor or less of a model, whatever it weighs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_tokenizer

from liger_convert.config.stages import Lora
from liger_convert.io.checkpoint import ADAPTER_WEIGHTS, INDEX, load_config
from liger_convert.mixers import resolve_spec
from liger_convert.model.bases import meta_model
from liger_convert.model.shards import Entry, safetensors_header, write_file
from liger_convert.pipeline.convert import convert_checkpoint
from liger_convert.training.merge import ADAPTER
from liger_convert.training.sharding import without_weights
from liger_convert.training.student import add_lora

LAYERS, SHARDS = 12, 3


def sparse_base(folder: Path) -> Path:
    """A base of zeros in several shards, which take no room on the disk: 100 MB in bfloat16."""
    config = tiny_config(
        "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=LAYERS, head_dim=128, dtype=torch.bfloat16
    )
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    named = list(meta_model(config).state_dict().items())
    weight_map = {}
    for number in range(SHARDS):
        entries = [Entry(name, torch.bfloat16, tuple(tensor.shape)) for name, tensor in named[number::SHARDS]]
        file, header = f"model-{number}.safetensors", safetensors_header(entries)
        (folder / file).write_bytes(header)
        with open(folder / file, "r+b") as shard:
            shard.truncate(len(header) + sum(entry.nbytes for entry in entries))
        weight_map |= {entry.name: file for entry in entries}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def adapter(model: Path, result: Path) -> Path:
    """What a LoRA stage leaves."""
    made = add_lora(without_weights(load_config(model)), Lora(rank=4, targets="all"), train_mixer=True)
    made.peft_config["default"].save_pretrained(result / ADAPTER)
    state = get_peft_model_state_dict(made, save_embedding_layers=False)
    random = {name: torch.full(tensor.shape, 1e-3) for name, tensor in state.items()}
    save_file(random, result / ADAPTER / ADAPTER_WEIGHTS)
    return result


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells such a peak")
def test_no_step_from_file_to_file_holds_a_model(tmp_path: Path) -> None:
    """Of 200 MB in float32. The control merges as an adapter does that only a whole model takes."""
    base = sparse_base(tmp_path / "base")
    linearization = {"format": 2, "mixers": {"main": resolve_spec({"type": "gla"})}, "layers": ["main"] * LAYERS}
    convert_checkpoint(base, tmp_path / "model", linearization)
    adapter(tmp_path / "model", tmp_path / "result")
    script = """
        import json, sys
        from pathlib import Path
        from liger_convert.pipeline import convert, export, verify
        from liger_convert.training import merge

        def peak():  # of this process alone: that of getrusage begins with what its parent had
            status = Path("/proc/self/status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))

        def told(name, work):
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
            before = peak()
            work()
            found[name] = peak() - before

        folder, linearization, found = Path(sys.argv[1]), json.loads(sys.argv[2]), {}
        results = [folder / "result"]
        for dtype in ("auto", "float32"):
            out = folder / f"model-{dtype}"
            told(out.name, lambda: convert.convert_checkpoint(folder / "base", out, linearization, dtype=dtype))
        told("merge", lambda: merge.merge_results(folder / "model", results, folder / "merged"))
        told("export", lambda: export.export_model(folder / "merged", folder / "export", dtype="bfloat16"))
        told("verify", lambda: verify.verify_files(folder / "export"))
        merge._is_of_matrices = lambda folder: False
        told("control", lambda: merge.merge_results(folder / "model", results, folder / "whole"))
        print(json.dumps(found))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), json.dumps(linearization)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found.pop("control") > 180e6
    assert {name: peak for name, peak in found.items() if peak > 80e6} == {}


def test_a_file_is_written_a_tensor_at_a_time(tmp_path: Path) -> None:
    """What a stage saves comes from a GPU. The control holds all that the file is made of, as safetensors does."""
    entries = Entry.of({str(i): torch.empty(4, 4) for i in range(8)})
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []

    def made(i: int) -> torch.Tensor:
        alive.add(tensor := torch.full((4, 4), float(i)))
        most.append(len(alive))
        return tensor

    write_file(tmp_path / "file", entries, (made(i) for i in range(8)))
    assert max(most) <= 2  # the last one, and the one that is written
    read = load_file(tmp_path / "file")
    assert {name: float(tensor.mean()) for name, tensor in read.items()} == {str(i): float(i) for i in range(8)}
    write_file(tmp_path / "control", entries, [made(i) for i in range(8)])
    assert max(most) >= 8
