"""vLLM compiles a linearized model around its linear layers, and answers what `generate` answers.

On a CPU, vLLM compiles a model in one piece. With `pieces` it does what it does on a GPU: it splits the graph at
attention and at the linear layers, and compiles what is between them, here without CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import (
    LENGTHS,
    Reference,
    answers,
    assert_same,
    broken,
    engine,
    lose,
    make_export,
    prompt_logprobs,
    prompts,
    run,
    sampling,
)
from vllm.compilation import backends
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode
from vllm.platforms.cpu import CpuPlatform

from liger_convert.serving import plugin
from liger_convert.serving.settings import ATTEND

TEXTS = prompts(LENGTHS)
HYBRID = ["main", "softmax", "main"]
SPLIT_AT = "vllm::unified_attention_with_output"


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ops at which vLLM's own backend, which a CPU platform does not use by itself, split the graph."""
    found: list[str] = []
    check, split = CpuPlatform.check_and_update_config.__func__, backends.split_graph  # type: ignore[attr-defined]

    def keeping(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        mode = compilation.mode
        check(cls, vllm_config)
        compilation.mode, compilation.compile_sizes = mode, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        graph, items = split(*args, **kwargs)
        for item in items:
            if item.is_splitting_graph:
                found.extend(map(op_name, item.graph.graph.nodes))
        return graph, items

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keeping))
    monkeypatch.setattr(backends, "split_graph", watched)
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda *args: None)  # it names ops of a GPU
    return found


def op_name(node: Any) -> str:
    """The name of the op that a node of a graph calls; empty for other nodes."""
    return str(getattr(node.target, "_qualified_op_name", ""))


def compiling(export: Path, **options: Any) -> Any:
    return engine(export, compilation_config={"mode": CompilationMode.VLLM_COMPILE}, **options)


def backbone(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model.model


def assert_served(export: Path, llm: Any) -> None:
    """Answers and prompt log-probabilities are those of `generate`, and are not if the states are lost."""
    assert isinstance(backbone(llm), TorchCompileWithNoGuardsWrapper)
    assert not backbone(llm).do_not_compile
    reference = Reference(export)
    wanted = [(text, reference.tolerance(text)) for text in TEXTS]

    def check(name: str) -> None:
        for output, (text, tolerance) in zip(run(llm, TEXTS, sampling(prompt_logprobs=0), every=2, name=name), wanted):
            assert_same(answers(output)[0], reference.generate(text), tolerance)
            if len(text) > 1:
                assert (prompt_logprobs(output) - reference.score_prompt(text)).abs().max() <= tolerance

    check("kept")
    with broken(lose("states")) as broke, pytest.raises(AssertionError):
        check("lost")
    assert any(broke)


def test_a_model_compiled_in_one_piece(tmp_path: Path) -> None:
    export = make_export(tmp_path, "llama", HYBRID, type="gla")
    before = Reference(export).model.model
    with compiling(export) as llm:
        assert_served(export, llm)
        assert not isinstance(before, TorchCompileWithNoGuardsWrapper)
        assert isinstance(backbone(llm), type(before))


@pytest.mark.parametrize(
    ("family", "layers", "mixer"),
    [
        ("llama", HYBRID, "gla"),
        ("llama", ["main"] * 3, "gated-deltanet"),
        ("stablelm", HYBRID, "gla"),
        ("mixtral", HYBRID, "gla"),
        *[pytest.param(family, HYBRID, "gla", marks=pytest.mark.slow) for family in ("phi3", "qwen3_moe", "olmoe")],
    ],
)
def test_a_model_compiled_in_pieces(
    family: str, layers: list[str], mixer: str, pieces: list[str], tmp_path: Path
) -> None:
    export = make_export(tmp_path, family, layers, type=mixer)
    with compiling(export) as llm:
        assert_served(export, llm)
    assert pieces.count(ATTEND) == layers.count("main")
    assert pieces.count(SPLIT_AT) == layers.count("softmax")


def test_without_its_setting_vllm_does_not_split_at_the_linear_layers(
    pieces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_split", lambda compilation: None)
    with compiling(make_export(tmp_path, "llama", HYBRID, type="gla")):
        pass
    assert pieces.count(ATTEND) == 0
    assert pieces.count(SPLIT_AT) == 1
