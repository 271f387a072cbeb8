"""Commands that read and write files hold at most one tensor of a model in memory, however large the model is."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from launching import environment
from peaks import TOLD
from safetensors.torch import load_file
from sparse import adapter, sparse_base
from tiny import tiny_config

from liger_convert.mixers import resolve_spec
from liger_convert.model.shards import Entry, write_file
from liger_convert.pipeline.convert import convert_checkpoint

LAYERS = 12


@pytest.mark.skipif(not TOLD, reason="only Linux tells such a peak")
def test_no_step_from_file_to_file_holds_a_model(tmp_path: Path) -> None:
    """The model has 200 MB in float32. The control merges an adapter that can only be applied to a whole model."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "head_dim": 128}
    base = sparse_base(tmp_path / "base", tiny_config("llama", dtype=torch.bfloat16, **sizes), shard=30_000_000)
    linearization = {"format": 2, "mixers": {"main": resolve_spec({"type": "gla"})}, "layers": ["main"] * LAYERS}
    convert_checkpoint(base, tmp_path / "model", linearization)
    adapter(tmp_path / "model", tmp_path / "result")
    script = """
        import json, sys
        from pathlib import Path
        from peaks import forget_peak, peak
        from liger_convert.pipeline import convert, export, verify
        from liger_convert.training import merge

        def told(name, work):
            before = forget_peak()
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
    found = json.loads(subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout)
    assert found.pop("control") > 180e6
    assert {name: peak for name, peak in found.items() if peak > 80e6} == {}


@pytest.mark.skipif(not TOLD, reason="only Linux tells such a peak")
def test_a_stage_begins_and_resumes_with_one_copy_in_memory(tmp_path: Path) -> None:
    """The model has 200 MB in float32 and comes after an adapter; the pages of its files are not counted. The
    optimizer's state for a tensor of 80 MB is not copied either when it goes to another device. One control loads the
    model twice, and the other reads the optimizer's state whole."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "head_dim": 128}
    base = sparse_base(tmp_path / "base", tiny_config("llama", dtype=torch.bfloat16, **sizes))
    linearization = {"format": 2, "mixers": {"main": resolve_spec({"type": "gla"})}, "layers": ["main"] * LAYERS}
    convert_checkpoint(base, tmp_path / "model", linearization)
    adapter(tmp_path / "model", tmp_path / "result")
    script = """
        import json, sys
        from pathlib import Path
        import torch
        from peaks import STATUS, forget_peak, peak
        from liger_convert.training import sharded_checkpoint
        from liger_convert.training.stage import load_start

        def own():  # without the pages of files, which can be given back
            return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if "RssAnon" in line)

        folder, found = Path(sys.argv[1]), {}
        for name, times in (("start", 1), ("start, twice", 2)):
            before = forget_peak()
            models = [load_start(folder / "model", [folder / "result"], None) for _ in range(times)]
            found[name] = peak() - before
            found["needs"] = sum(p.nbytes for p in models[0].parameters())
            del models
        parameter = torch.nn.Parameter(torch.zeros(20_000_000))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter])
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        optimizer.state.clear()
        forget_peak()
        held, most, copy = own(), [], sharded_checkpoint.copy_whole
        sharded_checkpoint.copy_whole = lambda into, whole: (copy(into, whole), most.append(own()))
        sharded_checkpoint.load_whole_optimizer(folder / "optimizer.pt", [parameter], optimizer)
        found["moments"] = max(most) - held
        optimizer.state.clear()
        whole = torch.load(folder / "optimizer.pt", weights_only=True)
        optimizer.state.update({parameter: {k: x.clone() for k, x in whole["state"][0].items()}})
        found["moments, read whole"] = own() - held
        print(json.dumps(found))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    found = json.loads(subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout)
    stored = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert found["start"] < found["needs"] + stored + 40e6
    assert found["start, twice"] > 2 * found["needs"] + 40e6 > found["needs"] + stored + 40e6
    assert found["moments"] < 160e6 + 10e6
    assert found["moments, read whole"] > 310e6


def test_a_file_is_written_a_tensor_at_a_time(tmp_path: Path) -> None:
    """The tensors that a stage saves come from a GPU. The control holds the whole content of the file, as safetensors
    does."""
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
