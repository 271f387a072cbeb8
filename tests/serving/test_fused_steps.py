"""vLLM decodes by the fused step on its pages, in Triton's interpreter, and answers what `generate` answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served import Reference, answers, assert_same, engine, make_export, prompts, run, sampling

pytest.importorskip("triton", reason="Triton is not installed")

from gated_kernels.common.registry import set_kernel
from gated_kernels.fused_step import triton as kernels

from liger_convert.io.checkpoint import load_config
from liger_convert.serving.layer import LayerPages
from liger_convert.serving.plugin import choose_execution
from liger_convert.serving.settings import ATTEND

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


@pytest.mark.parametrize(
    ("mixer", "changes", "mode", "graphs"),
    [
        ("gla", {}, None, "FULL_AND_PIECEWISE"),
        ("gla", {"enforce_eager": True}, "NONE", None),
        ("gla", {"mode": "NONE"}, "NONE", "FULL_DECODE_ONLY"),
        ("gla", {"optimization_level": 0}, "NONE", "FULL_DECODE_ONLY"),
        ("gla", {"mode": "STOCK_TORCH_COMPILE"}, "NONE", "FULL_DECODE_ONLY"),
        ("gla", {"cudagraph_mode": "FULL_DECODE_ONLY"}, None, "FULL_DECODE_ONLY"),
        ("gla", {"cudagraph_mode": "NONE"}, None, "NONE"),
        ("gla", {"cudagraph_mode": "NONE", "mode": "NONE"}, "NONE", None),
        ("gla", {"cuda": False}, "NONE", None),
        ("gla", {"cuda": False, "mode": "VLLM_COMPILE"}, "VLLM_COMPILE", "PIECEWISE"),
        ("gla", {"rope": "dynamic"}, "NONE", None),
        ("gated-deltanet", {}, None, "PIECEWISE"),
        ("gated-deltanet", {"cudagraph_mode": "FULL_AND_PIECEWISE"}, None, "PIECEWISE"),
        ("gated-deltanet", {"mode": "NONE"}, "NONE", None),
    ],
)
def test_what_is_compiled_and_captured(
    mixer: str,
    changes: dict[str, Any],
    mode: str | None,
    graphs: str | None,
    rows: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mode: what is left for vLLM to decide (None), or NONE. graphs: the CUDA graphs; None: the model runs eagerly."""
    import vllm.platforms
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    config = load_config(make_export(tmp_path, "llama", ["main", "softmax", "main"], type=mixer))
    if "rope" in changes:
        config.rope_parameters = {**config.rope_parameters, "rope_type": changes["rope"]}
    platform = SimpleNamespace(is_cuda=lambda: changes.get("cuda", True))
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    compilation = CompilationConfig()
    assert (compilation.mode, compilation.cudagraph_mode) == (None, None)
    if "mode" in changes:
        compilation.mode = CompilationMode[changes["mode"]]
    if "cudagraph_mode" in changes:
        compilation.cudagraph_mode = CUDAGraphMode[changes["cudagraph_mode"]]
    eager = changes.get("enforce_eager", False)
    settings = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, dtype=torch.bfloat16, enforce_eager=eager),
        compilation_config=compilation,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        optimization_level=changes.get("optimization_level", 2),
    )
    choose_execution(settings)
    assert compilation.mode == (None if mode is None else CompilationMode[mode])
    assert settings.model_config.enforce_eager == (graphs is None)
    if graphs is not None:
        assert compilation.cudagraph_mode == CUDAGraphMode[graphs]
    assert (ATTEND in (compilation.splitting_ops or [])) == (mode != "NONE")
