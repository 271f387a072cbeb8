"""A layer whose passes are captured as a CUDA graph trains as without one, and its hidden states are read and written
outside of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replays import replayed_on_a_cpu
from stages import make_stage, result_bytes, train

from liger_convert.config.stages import LearningRates, Lora, MixedSeqLen
from liger_convert.training import capture
from liger_convert.training.hidden_states import HiddenStates
from liger_convert.training.one_layer import LayerTrainer

HIDDEN = ("hidden-0", "hidden-1", "hidden-2")
LORA = {"learning_rates": LearningRates(mixer=1e-2, lora=2e-2), "lora": Lora(rank=4)}


def stage(**changes: Any) -> Any:
    return make_stage("align", **{"steps": 6, "layerwise": True, "concat_documents": True} | changes)


def watched_passes(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, str, int]], dict[str, bytes]]:
    """Lets hidden states of a layer that trains be read and written, and rows be counted, only outside of its passes.
    Returns what is read and written, and what is in each file when it is closed: both as they come."""
    inside: list[bool] = []
    done: list[tuple[str, str, int]] = []
    files: dict[str, bytes] = {}
    fwd_bwd, leave = LayerTrainer._eager_fwd_bwd, HiddenStates.__exit__

    def passes(self: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        taken = self.objective.taken
        inside.append(True)
        try:
            return fwd_bwd(self, batch)
        finally:
            inside.clear()
            assert self.objective.taken == taken, "a batch is counted, however often its pass runs"

    def noted(name: str) -> None:
        real = getattr(HiddenStates, name)

        def note(self: HiddenStates, row: int, *args: Any) -> Any:
            assert not inside, f"hidden states are {name} within a pass"
            if self.path.name.startswith("hidden"):
                done.append((name, self.path.name, row))
            return real(self, row, *args)

        monkeypatch.setattr(HiddenStates, name, note)

    def close(self: HiddenStates, *error: object) -> None:
        leave(self, *error)
        files[self.path.name] = self.path.read_bytes()

    noted("read")
    noted("write")
    monkeypatch.setattr(LayerTrainer, "_eager_fwd_bwd", passes)
    monkeypatch.setattr(HiddenStates, "__exit__", close)
    return done, files


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        pytest.param({"save_every": 2}, 1, id="full"),
        pytest.param(LORA, 1, id="lora", marks=pytest.mark.slow),
        pytest.param({"mixed_seq_lens": [MixedSeqLen(seq_len=16, fraction=0.5)], "accumulation": 2}, 2, id="lengths"),
    ],
)
def test_replayed_passes_write_the_same_hidden_states_and_train_the_same_bits(
    changes: dict[str, Any], graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is read and written once, although a capture runs its pass several times, and a replay overwrites the
    outputs of the one before while they may still be on their way to the disk."""
    made, found = stage(**changes), {}
    for name in ("plain", "replayed"):
        with monkeypatch.context() as patches:
            done = replayed_on_a_cpu(patches) if name == "replayed" else []
            slow_disk(patches)
            found[name] = (*watched_passes(patches), train(made, tmp_path / name))
    (plain_calls, plain_files, plain), (calls, files, replayed) = found["plain"], found["replayed"]
    assert done.count("captured") == 2 * graphs, "of each linear layer"
    assert done.count("replayed") == 2 * 6 * made.grad_accumulation
    assert calls == plain_calls
    for file in HIDDEN:
        rows = [row for kind, of, row in calls if (kind, of) == ("write", file)]
        assert rows == list(range(0, 12 * made.grad_accumulation, 2))
    assert files.keys() == plain_files.keys() == {*HIDDEN, "few-0", "few-1", "few-2"}
    assert all(files[name] == plain_files[name] for name in files)
    assert result_bytes(tmp_path / "replayed") == result_bytes(tmp_path / "plain")
    assert replayed["fwd_bwd"] == "captured"
    assert plain["fwd_bwd"] == "eager: there is no Nvidia GPU"
    for name in ("loss", "align_error", "trained_parameters"):
        assert replayed[name] == plain[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("shorter", [[], [MixedSeqLen(seq_len=16, fraction=0.5)]], ids=["one length", "two lengths"])
def test_a_layer_captured_on_a_gpu_is_trained_as_without_a_graph(
    shorter: list[MixedSeqLen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, found = stage(accumulation=2, mixed_seq_lens=shorter, calibrate=False), []
    for name, why in (("plain", "it is compared"), ("captured", None)):
        with monkeypatch.context() as patches:
            if why is not None:
                patches.setattr("liger_convert.training.trainer.why_not_captured", lambda *_, why=why: why)
            slow_disk(patches)
            calls, files = watched_passes(patches)
            found.append((calls, files, train(made, tmp_path / name, device=torch.device("cuda"))))
    (plain_calls, plain_files, plain), (calls, files, captured) = found
    assert plain["fwd_bwd"] == "eager: it is compared"
    assert captured["fwd_bwd"] == "captured"
    assert calls == plain_calls
    np.testing.assert_allclose(captured["loss"], plain["loss"], rtol=1e-3)
    for name in HIDDEN:
        one, other = (np.frombuffer(of[name], np.float32) for of in (files, plain_files))
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=name)


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a write begin long after it was asked for."""
    write = HiddenStates._write

    def late(self: HiddenStates, *args: Any) -> None:
        time.sleep(0.05)
        write(self, *args)

    monkeypatch.setattr(HiddenStates, "_write", late)


def test_no_thread_reads_or_writes_hidden_states_during_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did on the GPU would be an error of the capture."""
    replayed_on_a_cpu(monkeypatch)
    busy: list[str] = []
    captured = []

    def noted(name: str) -> None:
        real = getattr(HiddenStates, name)

        def late(self: HiddenStates, *args: Any) -> Any:
            busy.append(name)
            time.sleep(0.05)
            try:
                return real(self, *args)
            finally:
                busy.remove(name)

        monkeypatch.setattr(HiddenStates, name, late)

    noted("_read")
    noted("_write")
    capture_pass = capture.CapturedFwdBwd.capture

    def watched(self: capture.CapturedFwdBwd, batch: dict[str, torch.Tensor]) -> None:
        captured.append((self.knows(batch), list(busy)))
        capture_pass(self, batch)

    monkeypatch.setattr(capture.CapturedFwdBwd, "capture", watched)
    shorter = [MixedSeqLen(seq_len=16, fraction=0.5)]
    train(stage(accumulation=2, mixed_seq_lens=shorter), tmp_path)
    assert [found for known, found in captured if not known] == [[]] * 4, "two lengths in each of two layers"
    assert any(found for known, found in captured if known), "else they would not overlap with the GPU's work"


@pytest.mark.parametrize(
    ("family", "why"), [("llama", None), ("mistral", None), ("gemma2", "the attention is 'eager', not 'sdpa'")]
)
def test_a_layer_is_captured_on_a_gpu_if_neither_it_nor_that_of_the_base_is_against_it(
    family: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def asked(made: Any, models: list[Any], device: torch.device, exchanges: bool) -> str:
        found.append((len(models), capture.why_not_captured(made, models, torch.device("cuda"), exchanges)))
        return "there is no Nvidia GPU"

    monkeypatch.setattr("liger_convert.training.trainer.why_not_captured", asked)
    train(stage(steps=1, calibrate=False), tmp_path, family=family)
    assert found == [(2, why)] * 2


@pytest.mark.parametrize("fails", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_a_layer_whose_pass_cannot_be_captured_is_trained_as_it_is_and_told(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the pass has run, and left outputs, before its capture failed."""
    made = stage(steps=3)
    want = train(made, tmp_path / "plain")
    replayed_on_a_cpu(monkeypatch)
    works, tried = capture.capture, []

    def fail(*given: Any) -> Any:
        tried.append(len(tried))
        replay = works(*given)
        if tried[-1] == ("first", "last").index(fails):
            raise RuntimeError("operation not permitted when stream is capturing")
        return replay

    monkeypatch.setattr(capture, "capture", fail)
    got = train(made, tmp_path / "failed")
    assert len(tried) == 2
    assert got["fwd_bwd"] == "eager: the capture failed: operation not permitted when stream is capturing"
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
