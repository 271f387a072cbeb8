"""The fused step of one token in torch, for a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gated_kernels.fused_step import chunk
from gated_kernels.fused_step.cases import CASES, faults, in_pages, inputs, outcome
from gated_kernels.fused_step.chunk import fused_step, is_supported, is_supported_in_torch
from torch import Tensor


@pytest.mark.parametrize("case", CASES)
def test_the_step_in_torch_errs_at_most_twice_as_much_as_the_reference(case: str) -> None:
    token, cache, config = inputs(CASES[case])
    assert is_supported_in_torch(cache, config, token.q_BHD.shape[1])
    assert not is_supported(cache, config, token.q_BHD.shape[1])
    assert not faults(fused_step, (token, cache, config))


def test_a_step_without_its_memory_and_one_whose_state_does_not_decay_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, read = inputs(CASES["SmolLM2"]), chunk._read

    def empty(*args: Any) -> tuple[Tensor, Tensor | None]:
        read_BGRD, normalizer_BGR1 = read(*args)
        return 0 * read_BGRD, normalizer_BGR1

    with monkeypatch.context() as changed:
        changed.setattr(chunk, "_read", empty)
        assert [fault.split()[0] for fault in faults(fused_step, given)] == ["output"]
    monkeypatch.setattr(chunk, "_decay", lambda *_: None)
    assert [fault.split()[0] for fault in faults(fused_step, given)] == ["state_NGFD", "z_NGF"]


def test_a_row_of_padding_is_finite_and_leaves_its_memory_alone() -> None:
    token, cache, config = inputs(CASES["padding"])
    found = outcome(fused_step, (token, cache, config))
    gone = token.position_BS[:, 0] < CASES["padding"].M  # what leaves the window is padding or a sink
    assert gone.any()
    assert found["output"].isfinite().all()
    assert torch.equal(found["state_NGFD"][gone], cache.state_NGFD[gone])


def test_pages_are_left_to_kernels() -> None:
    _, cache, config = inputs(CASES["small"])
    assert is_supported_in_torch(cache, config, 4)
    assert not is_supported_in_torch(in_pages(cache)[1], config, 4)
