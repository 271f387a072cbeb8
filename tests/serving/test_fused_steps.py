"""vLLM decodes by the fused step on its pages, in Triton's interpreter, and answers what `generate` answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Reference, answers, assert_same, engine, make_export, prompts, run, sampling

triton = pytest.importorskip("triton", reason="Triton is not installed")

from gated_kernels.common.registry import set_kernel
from gated_kernels.fused_step import triton as kernels

from liger_convert.serving.layer import LayerPages

NEW = 4  # the interpreter is slow
TEXTS = prompts([1, 33, 64])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of requests in every call of the fused step."""
    found: list[int] = []

    def watched(token: Any, *args: Any) -> Any:
        found.append(len(token.q_BHD))
        return kernels.triton_fused_step(token, *args)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    set_kernel("fused_step", watched)
    yield found
    set_kernel("fused_step", None)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"enable_prefix_caching": True}], ids=str)
def test_decoding_on_pages(
    options: dict[str, Any], rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = make_export(tmp_path, "llama", ["main", "softmax", "main"], type="gla", codes=16)
    reference = Reference(export)
    wanted = [(reference.generate(text, NEW), reference.tolerance(text)) for text in TEXTS]
    step_cache = LayerPages.step_cache

    def lossy(self: LayerPages, *args: Any) -> Any:
        cache = step_cache(self, *args)
        assert cache is not None
        return cache._replace(state_NGFD=torch.zeros_like(cache.state_NGFD))

    def check(name: str) -> None:
        for output, (answer, tolerance) in zip(run(llm, TEXTS, sampling(NEW), name=name), wanted):
            assert_same(answers(output)[0], answer, tolerance)

    with engine(export, **options) as llm:
        check("kept")
        assert max(rows) == len(TEXTS)
        assert 1 in rows  # a prompt of one token, beside others that are read
        monkeypatch.setattr(LayerPages, "step_cache", lossy)
        with pytest.raises(AssertionError):
            check("lost")
