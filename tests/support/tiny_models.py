"""Tiny linearized models of every family and mixer, and the inputs that the conformance tests read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from folders import shared_folder
from tiny import save_tiny_base

from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base

WINDOW, SINKS = 5, 2
LAYERS = ["main", "softmax", "main"]
LOGITS = 1e-4  # of the largest logit, fp32 on a CPU
TOKENS = torch.randint(3, 101, (2, 29), generator=torch.Generator().manual_seed(0))
PROMPT = TOKENS[:, :9]
MASK = torch.ones_like(PROMPT)
PADDED = torch.cat((torch.cat((torch.zeros(1, 4, dtype=torch.long), PROMPT[:1, :5]), 1), PROMPT[1:]))
PADDED_MASK = torch.cat((torch.tensor([[0] * 4 + [1] * 5]), MASK[1:]))
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def linearization(layers: list[str] = LAYERS, **spec: Any) -> dict[str, Any]:
    return {"format": 2, "mixers": {"main": resolve_spec(spec)}, "layers": layers}


@functools.cache
def base_folder(family: str) -> Path:
    return save_tiny_base(family, shared_folder(f"tiny-{family}"), tokenizer=False)


def build(family: str, layers: list[str] = LAYERS, **spec: Any) -> Any:
    """A linearized tiny model in eval mode, its new parameters moved off their start so that the memory matters."""
    plan = linearization(layers, **spec)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return moved_off_start(linearize_base(base_folder(family), plan, **options).eval())


def moved_off_start(model: Any, share: float = 4) -> Any:
    """`model` with noise on its new parameters, and the log of the memory's share of the denominator raised."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mixer." in name:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.5
            if name.endswith("log_share_H"):
                parameter += share
    return model


@functools.cache
def shared_model(family: str, mixer: str) -> Any:
    bounded = {} if mixer == "forgetting" else {"window": WINDOW, "sinks": SINKS}  # that one sees all tokens
    return build(family, type=mixer, **bounded)


def assert_same_logits(a: torch.Tensor, b: torch.Tensor, tolerance: float = LOGITS) -> None:
    assert a.isfinite().all()
    assert (a - b).abs().max() <= tolerance * b.abs().max()


def logits(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **{"use_cache": False, **kwargs}).logits
