"""Which GPUs use the kernels by default. On all others, the ops run in torch, and one sentence says why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import gated_kernels
import pytest
import torch
from gated_kernels.common import chips

from liger_convert.utils.device import compute_dtype


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Fakes GPUs of these capabilities, of Nvidia or of AMD."""

    def fake(*capabilities: tuple[int, int], cuda: str | None = "12.8", hip: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: capabilities[getattr(device, "index", device)]
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: f"GPU {device}")
        monkeypatch.setattr(gated_kernels, "find_spec", lambda name: name)
        monkeypatch.setattr(gated_kernels, "has_fla", lambda: False)

    chosen = gated_kernels.in_use()
    yield fake
    gated_kernels.use(chosen)


def chosen() -> str:
    """The path of a process that begins, once its GPUs are in use."""
    gated_kernels.use(gated_kernels._default())
    gated_kernels._leave_unsuited()
    return gated_kernels.in_use()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_kernels_are_the_default_from_ampere_on(gpus, caplog, capability: tuple[int, int]) -> None:
    gpus(capability)
    assert chosen() == "triton"
    assert (gated_kernels.unsuited(), caplog.records) == (None, [])


@pytest.mark.parametrize("capabilities", [[(7, 5)], [(7, 0)], [(9, 0), (6, 1)]])
def test_older_gpus_run_the_torch_ops_and_one_sentence_says_so(gpus, caplog, capabilities: list) -> None:
    gpus(*capabilities)
    major, minor = capabilities[-1]
    assert chosen() == "torch"
    (said,) = caplog.messages
    assert said.startswith(f"GPU {len(capabilities) - 1} has compute capability {major}.{minor}")
    assert said.endswith("take 8.0 or more, so all ops run in torch")


def test_gpus_of_amd_run_the_torch_ops_and_one_sentence_says_so(gpus, caplog) -> None:
    gpus((9, 4), cuda=None, hip="6.4")
    assert chosen() == "torch"
    (said,) = caplog.messages
    assert "not one of Nvidia's" in said


def test_only_one_process_of_a_run_prints_the_sentence(gpus, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus((7, 5))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (chosen(), caplog.records) == ("torch", [])


def test_nothing_is_said_of_a_machine_without_a_gpu(gpus, caplog) -> None:
    gpus()
    assert (chosen(), caplog.records) == ("torch", [])


def test_a_logger_that_nobody_set_up_prints_the_sentence_alone(gpus, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus((7, 5))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    gated_kernels._leave_unsuited()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == gated_kernels.unsuited()


def test_an_import_initialises_no_gpu_and_older_ones_are_told_when_torch_does() -> None:
    said = """
import torch
torch.version.cuda, torch.cuda.is_available, torch.cuda.device_count = "12.8", lambda: True, lambda: 1
torch.cuda._lazy_init = lambda: exit("initialized")
torch.cuda.get_device_capability = lambda device: torch.cuda._lazy_init()
import gated_kernels
before = gated_kernels.in_use()
torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda device: (7, 5), lambda device: "GPU"
for call, *_ in torch.cuda._queued_calls:
    if call.__module__ == "gated_kernels":
        call()
print(before, gated_kernels.in_use())
"""
    environment = {name: value for name, value in os.environ.items() if name != "GATED_KERNELS"}
    ended = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, env=environment)
    assert ended.stdout.split() == ["triton+fla" if gated_kernels.has_fla() else "triton", "torch"], ended.stderr
    assert "compute capability 7.5" in ended.stderr


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_a_gpu_that_would_emulate_bf16_computes_in_float32(gpus, monkeypatch, capability, dtype: torch.dtype) -> None:
    gpus(capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=0: type("Properties", (), {"major": capability[0]})
    )
    assert compute_dtype(torch.device("cuda")) == dtype


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)]
)
def test_tiles_go_by_how_a_chip_multiplies(gpus, capability: tuple[int, int], expected: bool) -> None:
    gpus(capability)
    chips.multiplies_in_registers.cache_clear()
    try:
        assert chips.multiplies_in_registers(torch.device("cuda", 0)) == expected
        assert not chips.multiplies_in_registers(torch.device("cpu"))
    finally:
        chips.multiplies_in_registers.cache_clear()
