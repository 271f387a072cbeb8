"""vLLM's forwards without requests: linearized layers run their prefill on a page of their own, or give zeros."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served import Reference, answers, assert_same, engine, make_export, prompts, run

from liger_convert.serving import attention, warm_up
from liger_convert.serving.batch import StepMetadata

TEXTS = prompts([5, 33])


@pytest.mark.parametrize("layers", [["main", "softmax", "main"], ["main"] * 3], ids=["hybrid", "linear"])
def test_a_forward_without_requests(layers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export, calls, attend = make_export(tmp_path, "llama", layers, type="gla"), [], warm_up.attend_batch

    def watched(layer: Any, pages: Any, batch: Any, step: Any, *rest: Any) -> None:
        calls.append(step.x_1NC.shape[1])
        attend(layer, pages, batch, step, *rest)

    monkeypatch.setattr(attention, "WARMED_UP", ("cpu",))
    monkeypatch.setattr(warm_up, "attend_batch", watched)
    reference = Reference(export)
    with engine(export) as llm:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        served = llm.llm_engine.vllm_config.compilation_config.static_forward_context["model.layers.0.self_attn"]
        for tokens in (48, 48, 1):  # vLLM measures no memory on a CPU
            runner._dummy_run(tokens)
        once = len(warm_up.steps_of(48, served.layout))
        assert len(calls) == once
        assert not served.pages.pages.any()
        for text, output in zip(TEXTS, run(llm, TEXTS)):
            assert_same(answers(output)[0], reference.generate(text), reference.tolerance(text))
        before = served.pages.pages.clone()
        # as when vLLM tunes the kernels of softmax layers
        metadata = StepMetadata(torch.zeros(3, dtype=torch.long))
        context = SimpleNamespace(
            attn_metadata={"another": None},
            additional_kwargs={attention.METADATA: metadata},
            no_compile_layers={served.prefix: served},
        )
        monkeypatch.setattr(attention, "get_forward_context", lambda: context)
        x_1NC, angles = torch.ones(1, 3, 128), (torch.ones(1, 3, 32), torch.zeros(1, 3, 32))
        with torch.inference_mode():
            output, _ = served(x_1NC, angles)
        assert output.shape == x_1NC.shape
        assert not output.any()
        assert served.pages.pages.equal(before)
        assert len(calls) == once


def test_the_op_is_defined_where_vllms_decorator_wraps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it always does since 0.33. torch then looks up the names of types in the module of the decorator."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    code = "from liger_convert.serving import attention as a; print(a.attend.__globals__['__name__'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["vllm.compilation.breakable_cudagraph"], done.stderr
