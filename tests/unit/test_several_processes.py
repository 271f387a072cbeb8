"""Several processes train as one does: the same rows in the same steps, whoever is killed, however many go on.

Each launch imports torch in every process, so several stages share one.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SECONDS, distance, environment, learned, one_thread, spread, stopped_when, told, torchrun
from ranks import do
from runs import write_home
from safetensors.torch import load_file
from stages import SEQ_LEN, make_stage, result_bytes
from torch import Tensor

from liger_convert.io import checksums
from liger_convert.training import gradient_averaging
from liger_convert.training.batch_split import split_batch
from liger_convert.training.gradient_averaging import are_alike, average_flats, average_gradients, flat_like
from liger_convert.utils import processes
from liger_convert.utils.errors import BadInput

KINDS = ["align", "distill", "finetune", "distill-lora"]
EVERY = {"steps": 4, "batch": 2, "accumulation": 2, "warmup_ratio": 0.0, "schedule": "constant"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each kind of stage in one process, its statistics and what it learned, and how far rounding alone leads from
    there: the same rows of a step taken one by one, and in pairs."""
    found: dict[str, Any] = {}
    with one_thread():
        for name in KINDS:
            out = tmp_path_factory.mktemp(name)
            stats = do({"name": name, "out": out / "whole", "plain": True, "fields": EVERY})
            apart = EVERY | {"batch": 1, "accumulation": 4}
            do({"name": name, "out": out / "apart", "plain": True, "fields": apart})
            whole = learned(out / "whole")
            found[name] = stats, whole, distance(learned(out / "apart"), whole)
    return found


WAYS: dict[str, dict[str, Any]] = {"distill": {"shard": True}, "align": {"sequence_parallel": 2}}


def test_shared_weights_and_shared_rows_learn_what_one_process_does(tmp_path: Path) -> None:
    """One kind of stage for each. All kinds, also in four processes, are among the slow tests. The control takes the
    rows of the first process in both."""
    jobs = [
        {"name": name, "out": f"{tmp_path}/{name}", "plain": True, "fields": EVERY, "options": options}
        for name, options in WAYS.items()
    ]
    told(2, tmp_path, [*jobs, jobs[0] | {"out": f"{tmp_path}/same", "same_rows": True}])
    with one_thread():
        for job in jobs:
            alone = job | {"options": {}}
            do(alone | {"out": tmp_path / "whole" / job["name"]})
            do(alone | {"out": tmp_path / "apart" / job["name"], "fields": EVERY | {"batch": 1, "accumulation": 4}})
            whole = learned(tmp_path / "whole" / job["name"])
            rounding, away = (distance(learned(out), whole) for out in (tmp_path / "apart" / job["name"], job["out"]))
            assert 0 < rounding < 1e-4, job["name"]
            assert away < 100 * rounding, job["name"]  # Adam magnifies what is rounded in gradients near zero
            if job is jobs[0]:
                assert distance(learned(tmp_path / "same"), whole) > 1000 * rounding


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same in two processes, `split` so that they share the rows of a micro-batch, and with a mistake."""
    folder = tmp_path_factory.mktemp("two")
    split = EVERY | {"accumulation": 1, "batch": 4}
    jobs = [{"name": name, "out": f"{folder}/{name}", "plain": True, "fields": EVERY} for name in KINDS]
    jobs += [{"name": name, "out": f"{folder}/{name}-split", "plain": True, "fields": split} for name in KINDS]
    jobs += [{"name": name, "out": f"{folder}/{name}-same", "same_rows": True, "fields": EVERY} for name in KINDS]
    return folder, told(2, folder, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_two_processes_learn_what_one_does(one: dict[str, Any], two: Any, name: str) -> None:
    """Sums are taken in another order. That has the same effect as processing a step's rows one by one. The optimizer
    is plain gradient descent, because Adam takes a full step even for a gradient that is only rounding error."""
    (stats, alone, rounding), (folder, several) = one[name], two
    assert 0 < rounding < 1e-4
    for shared in ("", "-split"):
        assert distance(learned(folder / f"{name}{shared}"), alone) < 10 * rounding
        told = several[f"{name}{shared}"]
        assert {key: told[key] for key in ("steps", "tokens", "epochs")} == {
            key: stats[key] for key in ("steps", "tokens", "epochs")
        }
        assert [loss for _, loss in told["loss"]] == pytest.approx([loss for _, loss in stats["loss"]], rel=1e-4)
    assert distance(learned(folder / f"{name}-same"), alone) > 1000 * rounding


@pytest.mark.slow
def test_four_processes_learn_what_one_does(one: dict[str, Any], tmp_path: Path) -> None:
    """A row of each step for each. The control trains all processes on the rows of the first."""
    names = ["align", "finetune"]
    jobs = [{"name": name, "out": f"{tmp_path}/{name}", "plain": True, "fields": EVERY} for name in names]
    told(4, tmp_path, [*jobs, jobs[-1] | {"out": f"{tmp_path}/same", "same_rows": True}])
    for name in names:
        _, alone, rounding = one[name]
        assert distance(learned(tmp_path / name), alone) < 10 * rounding
    assert distance(learned(tmp_path / "same"), alone) > 1000 * rounding


def test_replayed_passes_of_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """A replay calls no hooks, so gradients are averaged after it. In `mixed`, the processes have rows of different
    lengths in a step and capture their graphs in different steps; in `documents`, rows of several documents. `half`
    computes in bfloat16. One control trains on equal rows, and the other averages no flat tensors."""
    one_text = EVERY | {"concat_documents": True}
    mixed = one_text | {"mixed_seq_lens": [{"seq_len": SEQ_LEN // 4, "fraction": 0.5}]}
    fields = {"align": one_text, "distill": one_text, "distill-lora": one_text, "mixed": mixed, "documents": EVERY}
    jobs = {}
    for out, options in fields.items():
        name = "distill" if out in ("mixed", "documents") else out
        jobs[out] = {"name": name, "out": str(tmp_path / out), "fields": options, "plain": True}
    half = {"out": str(tmp_path / "half"), "options": {"precision": "bfloat16"}}
    jobs["half"] = jobs["align"] | half  # with frozen weights, which are then read from where the stage began
    with one_thread():
        for out, job in jobs.items():
            do(job | {"out": tmp_path / f"{out}-one"})
    wrong = [jobs["distill"] | {"out": str(tmp_path / f"distill-{how}"), how: True} for how in ("same_rows", "apart")]
    several = told(2, tmp_path, [job | {"replayed": True} for job in [*jobs.values(), *wrong]])
    for name in jobs:
        assert several[name]["fwd_bwd"] == "captured"
        assert several[name]["flat"]
        assert distance(learned(tmp_path / name), learned(tmp_path / f"{name}-one")) < 1e-4
    for job in wrong:
        assert distance(learned(job["out"]), learned(tmp_path / "distill-one")) > 0.01


def mean_of_two(rank: int, size: int, store: str) -> list[list[float] | None]:
    """The gradients that a process of two has in the end; of the second weight only the second has one before."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    weights[3].data = weights[3].data.double()
    weights[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    weights[1].grad = torch.tensor([4.0, 0.0]) if rank else None
    weights[3].grad = torch.tensor([0.5, 0.0]).double()
    average_gradients(weights, size)
    torch.distributed.destroy_process_group()
    return [None if p.grad is None else p.grad.tolist() for p in weights]


def test_a_gradient_that_one_process_lacks_counts_as_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_averaging, "PIECE", 3)  # a piece for each
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.starmap(mean_of_two, [(rank, 2, f"{tmp_path}/store") for rank in range(2)], 1)
    assert found == [[[1.5, 3.0], [2.0, 0.0], None, [0.5, 0.0]]] * 2


def flats_of_two(rank: int, size: int, store: str) -> tuple[list[bool], list[list[float]]]:
    """Whether numbers are alike that are equal, 0, or different; and gradients whose flat tensors were averaged."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    alike = [are_alike(number, torch.device("cpu")) for number in (7, 0, 7 + rank, rank)]
    parts, flats = flat_like([torch.empty(3), torch.empty(2, dtype=torch.float64), torch.empty(1)])
    for number, part in enumerate(parts):
        part.fill_(number + rank)
    average_flats(flats, size)
    torch.distributed.destroy_process_group()
    return alike, [part.tolist() for part in parts]


def test_flat_gradients_are_averaged_where_all_processes_have_the_same(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.starmap(flats_of_two, [(rank, 2, f"{tmp_path}/store") for rank in range(2)], 1)
    assert found == [([True, False, False, False], [[0.5] * 3, [1.5] * 2, [2.5]])] * 2


def test_flat_gradients_are_averaged_without_a_look_at_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host reads a value, it waits for the passes, and everything it launches after them is late. The control
    has to read one."""

    def looked(*_: Any) -> Any:
        raise RuntimeError("a value was looked at")

    weight = torch.nn.Parameter(torch.zeros(2))
    (weight.grad,), flats = flat_like([torch.ones(2)])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with monkeypatch.context() as patches:
            for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
                patches.setattr(torch.Tensor, name, looked)
            average_flats(flats, 1)
            with pytest.raises(RuntimeError, match="looked at"):
                average_gradients([weight], 1)
    finally:
        torch.distributed.destroy_process_group()


def test_parts_of_a_flat_tensor_are_what_autograd_would_make() -> None:
    """The order of sums, and what a fused optimizer accepts, depend on strides and addresses."""
    made = [torch.empty(5), torch.empty(3, 4).t(), torch.empty(200, dtype=torch.bfloat16), torch.empty(2, 2)]
    parts, flats = flat_like(made)
    for number, (part, tensor) in enumerate(zip(parts, made, strict=True)):
        assert (part.shape, part.stride(), part.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert part.storage_offset() * part.itemsize % gradient_averaging.ALIGNED == 0
        part.fill_(number + 1)
    assert [part.unique().tolist() for part in parts] == [[1], [2], [3], [4]], "none lies in another"
    assert [flat.sum() for flat in flats] == [5 * 1 + 12 * 2 + 4 * 4, 200 * 3]


# --- stopping and going on


RESUMED = {"steps": 8, "batch": 2, "accumulation": 2, "save_every": 2, "ema_length": 0.2}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stage with dropout in two processes, undisturbed, and the same when one of them is killed in its sixth step."""
    folder = tmp_path_factory.mktemp("killed")
    jobs = [{"name": name, "out": f"{folder}/{name}-through", "fields": RESUMED} for name in ("lora", "finetune")]
    assert spread(2, folder, jobs).returncode == 0
    for name in ("lora", "finetune"):
        ended = spread(2, folder, [{"name": name, "out": f"{folder}/{name}", "fields": RESUMED, "dies": [1, 6]}])
        assert ended.returncode != 0
        assert "exitcode  : -9" in ended.stderr
        saved = sorted(path.name for path in (folder / name / "checkpoints").iterdir())
        assert saved[:2] == ["checkpoint-2", "checkpoint-4"]
    return folder


@pytest.mark.slow
def test_as_many_processes_end_with_the_weights_of_a_stage_that_nothing_stopped(killed: Path) -> None:
    shutil.copytree(killed / "lora", killed / "lora-on")
    ended = spread(2, killed, [{"name": "lora", "out": f"{killed}/lora-on", "fields": RESUMED, "resume": True}])
    assert ended.returncode == 0, ended.stderr
    assert result_bytes(killed / "lora-on") == result_bytes(killed / "lora-through")


def goes_on(killed: Path, processes: int) -> float:
    """The difference between a stage that is resumed with this number of processes and one that was never stopped."""
    out = killed / f"finetune-{processes}"
    shutil.copytree(killed / "finetune", out)
    job = {"name": "finetune", "out": str(out), "fields": RESUMED, "resume": True}
    assert spread(processes, killed, [job]).returncode == 0
    return distance(learned(out), learned(killed / "finetune-through"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_more_or_fewer_processes_go_on_with_the_right_rows(killed: Path, processes: int, tmp_path: Path) -> None:
    """The control resumes two steps too late, as a count of rows with another step size would."""
    assert goes_on(killed, processes) < 1e-3
    late = Path(shutil.copytree(killed / "finetune", tmp_path / "late"))
    state = late / "checkpoints/checkpoint-4/trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 4', '"global_step": 6'))
    checksums.write_sums(state.parent)
    shutil.rmtree(late / "checkpoints/checkpoint-6", ignore_errors=True)
    do({"name": "finetune", "out": late, "fields": RESUMED, "resume": True})
    assert distance(learned(late), learned(killed / "finetune-through")) > 1e-2


# --- who does what


@pytest.mark.parametrize(
    ("batch", "accumulation", "processes", "expected"),
    [(4, 1, 1, (4, 1)), (4, 2, 2, (4, 1)), (4, 3, 2, (2, 3)), (4, 2, 8, (1, 1)), (3, 2, 3, (1, 2)), (6, 4, 6, (2, 2))],
)
def test_whole_micro_batches_are_shared_before_their_rows(
    batch: int, accumulation: int, processes: int, expected: tuple[int, int]
) -> None:
    stage = make_stage("finetune", batch=batch, accumulation=accumulation)
    rows, times = split_batch(stage, processes)
    assert (rows, times) == expected
    assert rows * times * processes == batch * accumulation


LAUNCHES: dict[str, tuple[dict[str, str], int | None, str]] = {
    "no address": ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, None, "but MASTER_ADDR is not set"),
    "no number": ({"WORLD_SIZE": "two"}, None, "WORLD_SIZE is 'two'"),
    "accelerate, on a CPU": ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "x"}, None, "started one process"),
    "accelerate, for one": ({"ACCELERATE_MIXED_PRECISION": "no"}, 2, "started one process"),
    "another number": (
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
        4,
        "--gpus 4: the launcher started 2 processes",
    ),
}


@pytest.mark.parametrize("how", LAUNCHES)
def test_a_launcher_that_started_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    variables, gpus, says = LAUNCHES[how]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=says):
        processes.check_launch(gpus)


def test_one_process_is_launched_as_it_always_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [processes.check_launch(gpus) for gpus in (None, 1, 2)] == [False, False, True]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert not processes.check_launch(None)


# --- whole runs


TRAINED: list[dict[str, Any]] = [
    {"kind": "align", "learning_rates": {"mixer": 1e-2}},
    {"kind": "distill", "learning_rates": {"mixer": 1e-3, "body": 1e-4}, "tokens": 20 * 64, "save_every": 2},
]
COMMAND = [sys.executable, "-m", "liger_convert.cli"]
LINEARIZE = str(Path(sys.executable).with_name("linearize"))  # which imports torch only where it needs it
RUN = ["run", "recipe.yaml", "--out"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_home(folder, TRAINED)
    return folder


def call(home: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=home, env=environment(**variables), capture_output=True, text=True, timeout=2 * SECONDS
    )


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def exported(run: Path) -> dict[str, Tensor]:
    return {name: value for file in (run / "export").glob("*.safetensors") for name, value in load_file(file).items()}


def test_bad_input_ends_all_processes_with_one_sentence(home: Path) -> None:
    found = call(home, [LINEARIZE, *RUN, "bad", "--gpus", "2", "--set", "data.late.path=nowhere"])
    assert found.returncode == 2
    assert found.stderr.splitlines() == ["error: data.late.path: nowhere: there is no such file or folder"]
    assert not (home / "bad").exists()


@pytest.mark.slow  # torchrun's own account stands beside ours, and its exit code is 1
def test_bad_input_under_torchrun_is_told_once(home: Path) -> None:
    found = call(home, torchrun(2, *COMMAND[1:], *RUN, "bad", "--set", "base=nowhere"))
    assert found.returncode == 1
    assert len(errors(found.stderr)) == 1
    assert "exitcode  : 2" in found.stderr


@pytest.mark.slow
def test_an_error_of_any_process_ends_all_with_its_sentence(home: Path) -> None:
    """The second one cannot read what the first one could."""
    script = (
        "import os, sys\n"
        "from liger_convert.cli.main import main\n"
        "from liger_convert.pipeline import steps\n"
        "from liger_convert.utils.errors import BadInput\n"
        "def refuse(*args, **options):\n"
        "    raise BadInput('text.jsonl: is not here')\n"
        "if os.environ['RANK'] == '1':\n"
        "    steps.load_source = refuse\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (home / "second.py").write_text(script)
    found = call(home, torchrun(2, "second.py", *RUN, "second"))
    assert errors(found.stderr) == ["error: text.jsonl: is not here"]
    assert found.stderr.count("exitcode  : 2") >= 1


@pytest.mark.slow
def test_every_launcher_trains_the_same_run(home: Path) -> None:
    for out, command in {
        "alone": COMMAND,
        "torchrun": torchrun(2, *COMMAND[1:]),
    }.items():
        assert call(home, [*command, *RUN, out]).returncode == 0
    assert call(home, [*COMMAND, *RUN, "gpus", "--gpus", "2"]).returncode == 0
    weights = {out: exported(home / out) for out in ("alone", "torchrun", "gpus")}
    assert all(value.equal(weights["gpus"][name]) for name, value in weights["torchrun"].items())
    base = load_file(home / "base/model.safetensors")
    moved = {name: value - base[name] for name, value in weights["alone"].items() if name in base}
    ours = {name: weights["gpus"][name] - base[name] for name in moved}
    assert 0 < distance(ours, moved) < 1e-3
    record = json.loads((home / "gpus/manifest.json").read_text())
    assert record["machine"]["processes"] == 2
    alone = json.loads((home / "alone/manifest.json").read_text())
    for step in ("1-align", "2-distill"):
        assert record["steps"][step]["tokens"] == alone["steps"][step]["tokens"]


@pytest.mark.slow
def test_a_run_that_shares_its_weights_exports_what_one_process_does(home: Path) -> None:
    """A stage of adapters behind one of weights."""
    shared = ["--set", "sharding=full", "--set", "stages[1].learning_rates={mixer: 1e-3, lora: 1e-3}"]
    shared += ["--set", "stages[1].lora.rank=4"]
    assert call(home, [*COMMAND, *RUN, "whole", *shared]).returncode == 0
    found = call(home, [*COMMAND, *RUN, "shared", "--gpus", "2", *shared])
    assert found.returncode == 0, found.stderr
    record = json.loads((home / "shared/manifest.json").read_text())
    assert [record["steps"][step]["sharded"] for step in ("1-align", "2-distill")] == [True, True]
    base = load_file(home / "base/model.safetensors")
    moved = {
        out: {name: value - base[name] for name, value in exported(home / out).items() if name in base}
        for out in ("whole", "shared")
    }
    assert 0 < distance(moved["shared"], moved["whole"]) < 1e-3


@pytest.mark.slow
def test_two_processes_train_on_the_rows_of_a_mix_that_one_does(home: Path) -> None:
    mix, other = (["--set", f"stages[1].data={{text: {part}, late: {round(1 - part, 1)}}}"] for part in (0.7, 0.3))
    assert call(home, [*COMMAND, *RUN, "mix", *mix]).returncode == 0
    assert call(home, [*COMMAND, *RUN, "mix-2", "--gpus", "2", *mix]).returncode == 0
    assert call(home, [*COMMAND, *RUN, "mix-other", *other]).returncode == 0
    base = load_file(home / "base/model.safetensors")
    moved = {
        out: {name: value - base[name] for name, value in exported(home / out).items() if name in base}
        for out in ("mix", "mix-2", "mix-other")
    }
    print(distance(moved["mix-2"], moved["mix"]), distance(moved["mix-other"], moved["mix"]))
    assert distance(moved["mix-2"], moved["mix"]) < 1e-3
    assert distance(moved["mix-other"], moved["mix"]) > 1e-2  # control: other rows
    read = [json.loads((home / out / "manifest.json").read_text())["steps"]["2-distill"] for out in ("mix", "mix-2")]
    assert read[0]["sources"] == read[1]["sources"]


@pytest.mark.slow
def test_two_processes_write_the_bases_text_and_measure_as_one_does(home: Path) -> None:
    """Nothing is trained, so both runs measure the same models."""
    own = "{source: teacher, tokens: 480, document_tokens: 24, batch_size: 4}"
    asked = ["--set", f"data.own={own}", "--set", "stages=[]", "--keep-steps"]
    found = {}
    for out, launched in (("text-1", []), ("text-2", ["--gpus", "2"])):
        ended = call(home, [*COMMAND, *RUN, out, *asked, *launched])
        assert ended.returncode == 0, ended.stderr
        steps = json.loads((home / out / "manifest.json").read_text())["steps"]
        report = json.loads((home / out / "report.json").read_text())
        found[out] = {"text": steps["data-own"]["outputs"].values(), "models": report["models"]}
    assert found["text-1"]["models"] == found["text-2"]["models"]
    assert list(found["text-1"]["text"]) == list(found["text-2"]["text"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_ends_with_any_of_its_processes_and_goes_on_with_another_number(home: Path, number: int) -> None:
    """SIGKILL for one process; SIGTERM, which saves the step, for the launcher."""
    out = f"stopped-{number}"
    longer = ["--set", "stages[1].tokens=25600"]
    command = [*COMMAND, *RUN, out, "--gpus", "2", *longer]
    code, said, living = stopped_when(command, home, out, "steps/2-distill/checkpoints/checkpoint-*", number)
    assert (code, living) == (128 + number, [])
    (sentence,) = errors(said)
    assert sentence.endswith(f"the same command with --resume continues {out}")
    assert ("process 1 of this run was killed by SIGKILL" in sentence) == (number == signal.SIGKILL)
    assert "Traceback" not in said
    found = call(home, [*COMMAND, *RUN, out, "--resume", *longer])
    assert found.returncode == 0
    assert "processes was 2, is 1 on this machine, so the weights may differ a little" in found.stderr
