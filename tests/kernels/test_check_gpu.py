"""`kernels/check_gpu.py` runs, here on a CPU, and says what is wrong."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import gated_kernels
import pytest
import torch
from gated_kernels.common.registry import kernels_for

from liger_convert.mixers import MIXERS

KERNELS = Path(__file__).parents[2] / "kernels"
WORDS = [
    "--device",
    "cpu",
    "--processes",
    "1",
    "--only",
    "elementwise",
    "--only",
    "s4",
    "--only",
    "swa",
    "--only",
    "window",
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(KERNELS)
    return import_module("check_gpu")


def test_every_case_of_an_op_and_a_layer_of_a_mixer_are_checked(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", *WORDS, "--json", str(tmp_path / "found.json")])
    script.main()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["kind"], row["name"], row["path"]) for row in rows] == [
        ("op", "elementwise", "torch"),
        ("mixer", "s4", "torch"),
        ("op", "swa", "torch"),
        ("mixer", "window", "torch"),
    ]
    assert all(0 < row["worst"] <= 1 and not row["wrong"] for row in rows)
    assert "elementwise" in capsys.readouterr().out


def test_what_is_wrong_is_said_in_one_sentence(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gated_kernels.OPS["elementwise"]

    def wrong(**inputs: Any) -> Any:
        o, state = right(**inputs)
        return o * 1.001, state

    monkeypatch.setitem(gated_kernels.OPS, "elementwise", wrong)
    monkeypatch.setattr(script, "VARIATIONS", 2)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", *WORDS[:6]])
    with pytest.raises(SystemExit, match=r"^1 of 1 are wrong: op elementwise by torch \(one token, float32: output 0"):
        script.main()


def test_fla_core_is_checked_by_itself_on_what_our_kernels_take_as_well(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "has_fla", lambda: True)
    monkeypatch.setattr(gated_kernels, "has_fla", lambda: True)
    assert script.paths(torch.device("cuda")) == ("torch", "triton", "fla")
    with script.by("fla"):
        assert [kernel.__module__ for kernel in kernels_for("delta_rule")] == ["gated_kernels.delta_rule.fla"]
        assert not any(kernels_for(op) for op in ("delta_rule_step", "gla", "swa"))
    assert script.adds("fla", {"fla delta_rule"})
    assert not script.adds("fla", set())
    assert kernels_for("delta_rule") == ()


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_mixer_makes_no_tensor_on_another_device_than_its_own(
    mixer: str, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = torch.device("meta")  # holds no values, and what is on a CPU cannot meet what is there

    def stands_for(method: str, value: object) -> None:
        real = getattr(torch.Tensor, method)
        monkeypatch.setattr(torch.Tensor, method, lambda x: value if x.is_meta else real(x))

    stands_for("__bool__", True)
    stands_for("__int__", 3)
    autocast = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **options: nullcontext() if kind == "meta" else autocast(kind, **options)
    )
    layer, rotary = script.layer_of(mixer, torch.bfloat16)
    width = (script.HEADS + 2 * script.KV_HEADS) * script.HEAD_SIZE
    x_BTC = torch.empty(script.BATCH, script.PROMPT + script.STEPS, width, device=meta, dtype=torch.bfloat16)
    outputs = script.lived(layer.to(meta), rotary.to(meta), x_BTC)
    assert {x.device for x in outputs.values()} == {meta}
