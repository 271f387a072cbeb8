"""Several processes train as one does: the same rows in the same steps, whoever is killed, and with how many it goes on.

Each launch imports torch in every process, so several stages share one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import do
from safetensors.torch import load_file
from stages import files_of, folders, make_stage
from torch import Tensor

from liger_convert.training.merge import load_chain
from liger_convert.training.sharing import share
from liger_convert.utils.errors import BadInput

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = SUPPORT.parents[1]
SECONDS = 60  # that a launch may take once its processes have begun; a hung one fails its test
KINDS = ["align", "distill", "finetune", "distill-lora"]
EVERY = {"steps": 4, "batch": 2, "accumulation": 2, "warmup_ratio": 0.0, "schedule": "constant"}


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, [ROOT, ROOT / "kernels", SUPPORT]))
    without = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | changes


def torchrun(processes: int, *words: str | Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, *map(str, words)]


def spread(processes: int, folder: Path, jobs: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Does `jobs` of `ranks.py` in so many processes."""
    file = folder / f"jobs-{len(list(folder.glob('jobs-*')))}.json"
    file.write_text(json.dumps(jobs))
    command = torchrun(processes, SUPPORT / "ranks.py", file)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=2 * SECONDS)


def learned(out: Path | str) -> dict[str, Tensor]:
    """By how much a stage changed each weight."""
    before, after = (load_chain(folders()[1], results).state_dict() for results in ([], [Path(out) / "result"]))
    return {name: after[name] - value for name, value in before.items() if value.is_floating_point()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Between two changes, as a fraction of the second."""
    size = sum(float(value.double().square().sum()) for value in theirs.values())
    return (sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs) / size) ** 0.5


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each kind of stage in one process, its statistics and what it learned, and how far rounding alone leads from
    there: the same rows of a step taken one by one, and in pairs."""
    found: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in KINDS:
        out = tmp_path_factory.mktemp(name)
        stats = do({"name": name, "out": out / "whole", "plain": True, "fields": EVERY})
        apart = EVERY | {"batch": 1, "accumulation": 4}
        do({"name": name, "out": out / "apart", "plain": True, "fields": apart})
        whole = learned(out / "whole")
        found[name] = stats, whole, distance(learned(out / "apart"), whole)
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same in two processes, `split` so that they share the rows of a micro-batch, and with a mistake."""
    folder = tmp_path_factory.mktemp("two")
    split = EVERY | {"accumulation": 1, "batch": 4}
    jobs = [{"name": name, "out": f"{folder}/{name}", "plain": True, "fields": EVERY} for name in KINDS]
    jobs += [{"name": name, "out": f"{folder}/{name}-split", "plain": True, "fields": split} for name in KINDS]
    jobs += [{"name": name, "out": f"{folder}/{name}-same", "same_rows": True, "fields": EVERY} for name in KINDS]
    ended = spread(2, folder, jobs)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return folder, dict(zip((Path(job["out"]).name for job in jobs), lines, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_two_processes_learn_what_one_does(one: dict[str, Any], two: Any, name: str) -> None:
    """Sums are taken in another order, which costs as much as taking a step's rows one by one. Plain descent, as Adam
    makes a whole step of a gradient that is nothing but rounding."""
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
