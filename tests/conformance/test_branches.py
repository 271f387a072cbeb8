"""Window and memory can each be switched off. The remaining branch keeps its dtype."""

from __future__ import annotations

import pytest
import torch
from gated_kernels.check import error
from tiny_models import SINKS, TOKENS, WINDOW, assert_same_logits, build, logits

from liger_convert.model import set_branches


def test_branches_can_be_switched_off_and_the_memory_is_really_used() -> None:
    model = build("llama", type="gla", window=WINDOW, sinks=SINKS)
    control = build("llama", type="window", window=WINDOW, sinks=SINKS)
    both = logits(model, TOKENS)
    set_branches(model, "memory")
    memory = logits(model, TOKENS)
    set_branches(model, "window")
    assert_same_logits(logits(model, TOKENS), logits(control, TOKENS))
    assert (both - memory).abs().max() > 0.1 * both.abs().max()
    assert (both - logits(control, TOKENS)).abs().max() > 0.1 * both.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixer", ["gla", "liger-paper", "mom"])
def test_every_branch_alone_keeps_to_the_dtype_of_its_model(mixer: str, dtype: torch.dtype) -> None:
    model = build("llama", type=mixer, window=WINDOW, sinks=SINKS)
    exact = {}
    for branches in ("both", "memory", "window"):
        set_branches(model, branches)
        exact[branches] = logits(model, TOKENS)
    model.to(dtype)
    errors = {}
    for branches, expected in exact.items():
        set_branches(model, branches)
        found = logits(model, TOKENS)
        assert found.dtype == dtype
        errors[branches] = error(found, expected)
    # beside a memory alone stands no window, and a codebook's temperature multiplies what rounding does to its queries
    assert max(errors.values()) <= 5 * errors["both"]
