"""Stages that take the path of a CUDA graph on a CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils


def replayed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has every stage take the path of a CUDA graph: its slots, warm-up and replays, on a CPU; what would be
    captured may look at no position. Returns the words for what happens, as it does."""
    from liger_convert.model import sequence
    from liger_convert.model.cuda_graphs import WARM_UP, without_cached_casts
    from liger_convert.training import capture, trainer

    done: list[str] = []

    class Memory:
        used = contextlib.nullcontext

        def __init__(self) -> None:
            done.append("memory")

    def looked(*_: Any) -> Any:
        raise RuntimeError("a value of the batch was looked at")

    def stand_in(step: Any, given: tuple[Tensor, ...], tensors: Any, memory: Any) -> Any:
        slots = [x.clone() for x in given]
        assert not tensors()
        assert isinstance(memory, Memory)
        with monkeypatch.context() as patches:
            for module in (masking_utils, sequence):
                patches.setattr(module, "find_packed_sequence_indices", looked)
            for _ in range(WARM_UP):
                with without_cached_casts():
                    results = step(*slots)
        done.append("captured")

        def replay(*inputs: Tensor) -> tuple[Tensor, ...]:
            for slot, x in zip(slots, inputs, strict=True):
                slot.copy_(x)
            done.append("replayed")
            for result, found in zip(results, step(*slots), strict=True):
                result.copy_(found)  # each replay overwrites the results of the one before
            return results

        return replay

    monkeypatch.setattr(capture, "capture", stand_in)
    monkeypatch.setattr(capture, "SharedMemory", Memory)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(trainer, "why_not_captured", lambda *_: None)
    return done
