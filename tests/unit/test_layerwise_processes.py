"""Several processes train layer by layer as one does: they share the rows of each step and the files of hidden states.

The rows of a step are two micro-batches here, so that each of two processes computes what one process computes of them.
Half the sum of two gradients is the same number however it is taken, so two processes end with the bits of one.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from launching import SECONDS, distance, environment, learned, one_thread, said, spread, stopped_when
from layer_ranks import do
from ranks import stage_of
from runs import weights as run_weights
from runs import write_home
from safetensors.torch import load_file
from stages import files_of, folders, make_stage, train
from torch.utils.data import BatchSampler, SequentialSampler

from liger_convert.io.checkpoint import load_config
from liger_convert.training import sequence_parallel
from liger_convert.training.batch_split import batches_of, split_batch
from liger_convert.training.hidden_states import HiddenStates
from liger_convert.utils.errors import BadInput, LinearizeError

EVERY = {"steps": 3, "batch": 2, "accumulation": 2, "warmup_ratio": 0.0, "schedule": "constant"}
LENGTHS = {"mixed_seq_lens": [{"seq_len": 16, "fraction": 0.5}], "ema_length": 0.3}
ONE_TEXT = {"concat_documents": True}
ULP = 2**-24  # of float32: changes that are nearer, as fractions of what was learned, are the same
HIDDEN = {"hidden-0", "hidden-1", "hidden-2"}
ALIKE = ("steps", "tokens", "epochs", "trained_parameters", "loss", "align_error", "files")


def launched(processes: int, folder: Path, jobs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the first of so many processes said of each job, by the name of its folder."""
    found = said(spread(processes, folder, jobs, "layer_ranks.py"))
    return dict(zip((Path(job["out"]).name for job in jobs), found, strict=True))


def alone(job: dict[str, Any], out: Path, **changes: Any) -> dict[str, Any]:
    """The job without its mistake, in this process."""
    kept = {name: value for name, value in job.items() if name not in ("same_rows", "apart", "shifted", "late")}
    with one_thread():
        return do(kept | {"out": str(out)} | changes)


def losses(stats: dict[str, Any]) -> list[float]:
    return [loss for _, loss in stats["loss"]]


def result(out: Path) -> dict[str, bytes]:
    """The bits of each tensor. Their order in a file depends on how the process saved the base that it made."""
    tensors = {name: x for file in files_of(out) for name, x in load_file(file).items()}
    return {name: x.numpy().tobytes() for name, x in tensors.items()}


class Stop(Exception):
    """Ends a stage at some moment, as a killed process would."""


def stopped(job: dict[str, Any], at: float) -> None:
    fields = {"layerwise": True, **job["fields"]}

    def progress(done: float, total: float | None, note: str = "") -> None:
        if total is not None and done >= at:
            raise Stop

    with pytest.raises(Stop), one_thread():
        train(stage_of(job | {"fields": fields}), Path(job["out"]), progress=progress)


def test_two_processes_end_with_the_bits_of_one(tmp_path: Path) -> None:
    """Of a model with a softmax layer between two linear ones. `late` has a process whose writes to the disk are long
    behind. `begun` goes on from the middle of the last layer, which one process had begun. In `split`, rounding differs
    as in processing a step's rows one by one. The control averages no gradients."""
    full: dict[str, Any] = {"name": "align", "fields": EVERY}
    jobs: dict[str, dict[str, Any]] = {
        "late": full | {"late": 1},
        "replayed": full | {"replayed": True, "fields": EVERY | ONE_TEXT},
        "begun": {"name": "align-lora", "resume": True, "fields": EVERY | {"save_every": 2}},
        "split": full | {"plain": True, "fields": EVERY | {"batch": 4, "accumulation": 1}},
        "apart": full | {"plain": True, "apart": True},
    }
    jobs = {name: job | {"out": str(tmp_path / name)} for name, job in jobs.items()}
    stopped(jobs["begun"], at=2 * 3 + 3)
    found = launched(2, tmp_path, list(jobs.values()))
    for name in ("late", "replayed", "begun"):
        want = alone(jobs[name], tmp_path / "one" / name, resume=False)
        assert result(tmp_path / name) == result(tmp_path / "one" / name), name
        got = json.loads(json.dumps(found[name]))
        files = got["files"].keys()
        want["files"] = {file: want["files"][file] for file in files}
        assert files == (HIDDEN if name != "begun" else {"hidden-2"})
        assert {key: got[key] for key in ALIKE} == json.loads(json.dumps({key: want[key] for key in ALIKE}))
        assert got["fwd_bwd"] == want["fwd_bwd"]
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["result", "stats.json"]
        assert set(got["kept"]) == {0}, "a layer that is done is given up"
    assert found["replayed"]["flat"] == [False, True, True] * 2, "the first step captures"
    want = alone(jobs["split"], tmp_path / "one/split")
    alone(jobs["split"], tmp_path / "one/rows", fields=EVERY | {"batch": 1, "accumulation": 4})
    whole = learned(tmp_path / "one/split")
    rounding = distance(learned(tmp_path / "one/rows"), whole)
    assert 0 < rounding < 1e-7
    assert distance(learned(tmp_path / "split"), whole) < max(10 * rounding, ULP)
    for key in ("before", "after"):
        assert found["split"]["align_error"][key] == pytest.approx(want["align_error"][key], rel=1e-5)
    assert losses(found["split"]) == pytest.approx(losses(want), abs=2e-5)  # they are rounded to 5 digits
    assert distance(learned(tmp_path / "apart"), whole) > max(1000 * rounding, 100 * ULP)


@pytest.mark.slow
def test_a_spare_process_changes_neither_weights_nor_hidden_states(tmp_path: Path) -> None:
    """Two of three processes share the rows. Three times two thirds of a sum is rounded otherwise, so weights are as
    near as those of rows processed one by one."""
    job = {"name": "align", "plain": True, "fields": EVERY, "out": str(tmp_path / "three")}
    found = launched(3, tmp_path, [job])["three"]
    want = alone(job, tmp_path / "one")
    alone(job, tmp_path / "rows", fields=EVERY | {"batch": 1, "accumulation": 4})
    whole = learned(tmp_path / "one")
    rounding = distance(learned(tmp_path / "rows"), whole)
    assert 0 < rounding < 1e-7
    assert distance(learned(tmp_path / "three"), whole) < max(10 * rounding, ULP)
    assert losses(found) == pytest.approx(losses(want), abs=2e-5)
    assert found["files"] == {file: want["files"][file] for file in HIDDEN}


@pytest.mark.slow
def test_two_processes_train_every_kind_of_weights_as_one_does(tmp_path: Path) -> None:
    """Rows of two lengths, averaged weights, half precision, and all kinds of adapters. The controls take the same rows
    in both processes, or the hidden states of the other one's rows."""
    kinds: dict[str, dict[str, Any]] = {
        "lengths": {"name": "align", "fields": EVERY | LENGTHS},
        "half": {"name": "align", "fields": EVERY, "options": {"precision": "bfloat16"}},
        "mixers": {"name": "align", "fields": EVERY | {"learning_rates": {"mixer": 1e-2}}},
        "lora": {"name": "align-lora", "fields": EVERY},
        "dora": {"name": "align-lora", "variant": "dora", "fields": EVERY},
        "pissa": {"name": "align-lora", "variant": "pissa", "fields": EVERY},
        "same": {"name": "align", "fields": EVERY, "same_rows": True},
        "shifted": {"name": "align", "fields": EVERY, "shifted": True},
    }
    jobs = {name: job | {"out": str(tmp_path / name)} for name, job in kinds.items()}
    found = launched(2, tmp_path, list(jobs.values()))
    for name, job in jobs.items():
        want = alone(job, tmp_path / "one" / name)
        alike = result(tmp_path / name) == result(tmp_path / "one" / name)
        assert alike == (name not in ("same", "shifted")), name
        assert (found[name]["files"] == want["files"]) == alike, name
        if alike:
            assert json.dumps([found[name][key] for key in ALIKE]) == json.dumps([want[key] for key in ALIKE]), name


@pytest.mark.slow
def test_four_processes_train_what_one_does(tmp_path: Path) -> None:
    """A row of each step for each. The control takes the rows of the first process in all."""
    jobs: list[dict[str, Any]] = [
        {"name": name, "out": f"{tmp_path}/{name}", "plain": True, "fields": EVERY} for name in ("align", "align-lora")
    ]
    found = launched(4, tmp_path, [*jobs, jobs[0] | {"out": f"{tmp_path}/same", "same_rows": True}])
    for job in jobs:
        name = job["name"]
        want = alone(job, tmp_path / "one" / name)
        alone(job, tmp_path / "rows" / name, fields=EVERY | {"batch": 1, "accumulation": 4})
        whole = learned(tmp_path / "one" / name)
        rounding = distance(learned(tmp_path / "rows" / name), whole)
        assert 0 < rounding < 1e-7
        assert distance(learned(tmp_path / name), whole) < 10 * rounding
        assert losses(found[name]) == pytest.approx(losses(want), abs=2e-5)
        if name == "align":
            assert distance(learned(tmp_path / "same"), whole) > 1000 * rounding


# --- stopping and going on


KILLED = EVERY | {"steps": 8, "save_every": 2}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage of one process that nothing stopped, and the same in two, of which the second is killed: in the sixth
    step of the last layer, or in the softmax layer before it."""
    folder = tmp_path_factory.mktemp("killed")
    alone({"name": "align", "fields": KILLED}, folder / "through")
    for name, at in (("last", 16 + 6), ("softmax", 8 + 4)):
        ended = spread(
            2,
            folder,
            [{"name": "align", "out": f"{folder}/{name}", "fields": KILLED, "dies": [1, at]}],
            "layer_ranks.py",
        )
        assert ended.returncode != 0
        assert "exitcode  : -9" in ended.stderr
    saved = sorted(path.name for path in (folder / "last/layerwise/checkpoints").iterdir())
    assert saved[:2] == ["checkpoint-2", "checkpoint-4"]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last", "softmax"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_processes_goes_on_after_one_was_killed(killed: Path, name: str, processes: int) -> None:
    """Up to two, a process computes whole micro-batches, and so the same bits. Four sum a step's rows in another order,
    and Adam magnifies what is rounded in gradients near zero."""
    out = killed / f"{name}-{processes}"
    shutil.copytree(killed / name, out)
    job = {"name": "align", "out": str(out), "fields": KILLED, "resume": True}
    if processes == 1:
        with one_thread():
            do(job)
    else:
        launched(processes, killed, [job])
    if processes <= 2:
        assert result(out) == result(killed / "through")
    else:
        assert 0 < distance(learned(out), learned(killed / "through")) < 1e-3
    assert sorted(path.name for path in out.iterdir()) == ["result", "stats.json"]


# --- parts


@pytest.mark.parametrize(
    ("batch", "accumulation", "processes"), [(4, 1, 1), (4, 2, 2), (4, 3, 2), (4, 2, 8), (3, 2, 3), (6, 4, 6)]
)
def test_a_process_takes_the_rows_that_trainer_deals_to_it(batch: int, accumulation: int, processes: int) -> None:
    """Rows behind the last whole step belong to none."""
    stage = make_stage("align", steps=5, batch=batch, accumulation=accumulation)
    rows, times = split_batch(stage, processes)
    found = [batches_of(stage, 5, processes, number) for number in range(processes)]
    for number, batches in enumerate(found):
        sampler = BatchSampler(SequentialSampler(range(5 * batch * accumulation + 1)), rows, False)
        dealt = list(BatchSamplerShard(sampler, processes, number))
        assert [list(x) for x in batches] == dealt[: 5 * times]
    assert sorted(row for batches in found for x in batches for row in x) == list(range(5 * batch * accumulation))


def test_processes_write_into_one_file_and_read_ahead_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that another process has not written yet is refused."""
    x_NTC, fetched = torch.randn(8, 3, 5), []
    fetch = HiddenStates._fetch
    with HiddenStates(tmp_path / "x", 8, 3, 5, torch.float32) as one:
        with HiddenStates(tmp_path / "x", 8, 3, 5, torch.float32) as other:
            for row in (0, 4):
                one.write(row, x_NTC[row : row + 2])
            one.flush()
            with pytest.raises(LinearizeError, match="row 2 is not what was written there"):
                other.read(2, 2, 6)
            for row in (6, 2):
                other.write(row, x_NTC[row : row + 2])
            other.flush()
        monkeypatch.setattr(HiddenStates, "_fetch", lambda *args: fetched.append(args[1:]) or fetch(*args))
        assert one.read(0, 8, 8).equal(x_NTC)
        assert one.read(2, 2, 6).equal(x_NTC[2:4])
        assert one.read(6, 2, 8).equal(x_NTC[6:])
    assert fetched == [(0, 8), (2, 2), (6, 2)], "nothing is read twice, and nothing of others"


def test_rows_that_are_cut_into_shards_are_not_trained_layer_by_layer() -> None:
    stage, config = make_stage("align", layerwise=True), load_config(folders()[1])
    with pytest.raises(
        BadInput, match=r"sequence_parallel: align trains layer by layer, on whole rows.*leave layerwise"
    ):
        sequence_parallel.check(stage, config, 2)
    sequence_parallel.check(stage, config, 1)


# --- whole runs


COMMAND = [sys.executable, "-m", "liger_convert.cli", "run", "recipe.yaml", "--out"]
UNCHECKED = ["--set", "when_worse=ignore"]  # tiny texts teach nothing
ALIGN = {"kind": "align", "layerwise": True, "learning_rates": {"mixer": 1e-2, "attention": 1e-3}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_home(folder, [ALIGN | {"grad_accumulation": 2, "tokens": 40 * 128, "save_every": 2}])
    return folder


def call(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    return subprocess.run(
        command, cwd=home, env=environment(), capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )


def test_a_run_refuses_to_share_rows_that_are_trained_layer_by_layer(home: Path) -> None:
    found = call(home, "refused", "--gpus", "2", "--set", "sequence_parallel=2")
    assert found.returncode == 2
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: sequence_parallel: align trains layer by layer")
    assert not (home / "refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_of_two_processes_ends_with_the_weights_of_one_and_goes_on_when_stopped(home: Path, number: int) -> None:
    """Also with sharding: full, which is for other stages. SIGKILL is for one process, and SIGTERM, which saves the
    step, for the launcher."""
    out = f"two-{number}"
    if not (home / "one").exists():
        assert call(home, "one", *UNCHECKED).returncode == 0
    words = [out, "--gpus", "2", "--set", "sharding=full", *UNCHECKED]
    code, errors, living = stopped_when([*COMMAND, *words], home, out, "steps/1-align/layerwise/hidden-2", number)
    assert (code, living) == (128 + number, [])
    assert "Traceback" not in errors
    found = call(home, *words, "--resume")
    assert found.returncode == 0, found.stderr
    assert run_weights(home / out) == run_weights(home / "one")
    record = json.loads((home / out / "manifest.json").read_text())
    assert record["machine"]["processes"] == 2
    assert record["steps"]["1-align"]["sharded"] is False
