"""What other programs start as several processes, `accelerate launch` and a job of SLURM, is the run of one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from launching import ROOT, SECONDS, distance, environment, free_port
from runs import write_home
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.run import get_args_parser

from liger_convert.cli.main import app

RUN = ["-m", "liger_convert.cli", "run", "recipe.yaml", "--out"]
TRAINED: list[dict[str, Any]] = [
    {"kind": "align", "learning_rates": {"mixer": 1e-2}},
    {"kind": "distill", "learning_rates": {"mixer": 1e-3, "body": 1e-4}, "tokens": 20 * 64, "save_every": 2},
]
PAGE = ROOT / "docs/several-gpus.md"
# what a job finds on a host of a cluster; `srun` only writes down what it would start
TOOLS = {"scontrol": "printf 'host%s\\n' 1 2 3 4", "srun": """printf '%s\\n' "$@" > words"""}
JOB = {"JOB_ID": "70123", "JOB_NODELIST": "host[1-4]", "JOB_NUM_NODES": "4", "GPUS_ON_NODE": "8"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one process, `alone`."""
    folder = tmp_path_factory.mktemp("home")
    write_home(folder, TRAINED)
    call(folder, [sys.executable, *RUN, "alone"])
    return folder


def call(home: Path, command: list[str], **variables: str) -> str:
    """What a command that succeeds says."""
    found = subprocess.run(
        command, cwd=home, env=environment(**variables), capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert found.returncode == 0, found.stderr
    return found.stderr


def trained(home: Path, out: str) -> dict[str, Tensor]:
    """By how much a run changed each weight of the base."""
    base = load_file(home / "base/model.safetensors")
    found = {name: x for file in (home / out / "export").glob("*.safetensors") for name, x in load_file(file).items()}
    return {name: found[name] - value for name, value in base.items() if name in found}


def record(home: Path, out: str) -> Any:
    return json.loads((home / out / "manifest.json").read_text())


@pytest.mark.slow
def test_accelerate_launch_trains_the_run_of_one_process(home: Path) -> None:
    """It starts two processes over gloo if it is told that there is no GPU, and `--multi_gpu`."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    call(home, [*launcher, "--main_process_port", str(free_port()), *RUN, "accelerate"])
    alone, ours = (record(home, out) for out in ("alone", "accelerate"))
    assert ours["machine"]["processes"] == 2
    for step in ("1-align", "2-distill"):
        assert ours["steps"][step]["tokens"] == alone["steps"][step]["tokens"]
    assert 0 < distance(trained(home, "accelerate"), trained(home, "alone")) < 1e-3


def test_a_job_of_slurm_starts_a_torchrun_for_each_host_that_starts_a_process_for_each_gpu(tmp_path: Path) -> None:
    """The script on the page. A job that is requeued keeps its number, by which a run knows its own launch."""
    script = re.search(r"^#!/bin/bash\n.*?(?=^```$)", PAGE.read_text(), re.M | re.S)
    assert script is not None
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    for name, does in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    variables = {f"SLURM_{name}": value for name, value in JOB.items()} | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    call(tmp_path, ["bash", "-c", script[0]], **variables, PATH=path)
    launcher, *words = (tmp_path / "words").read_text().splitlines()
    assert launcher == "torchrun"
    asked = get_args_parser().parse_args(words)
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_backend, asked.rdzv_id) == ("4", "8", "c10d", "70123")
    assert asked.rdzv_endpoint == "host1:20123"
    assert (asked.module, asked.training_script) == (True, "liger_convert.cli")
    command, *rest = asked.training_script_args
    assert (ROOT / rest[0]).is_file()
    typer.main.get_command(app).commands[command].make_context(command, rest)  # every option is one of the command
