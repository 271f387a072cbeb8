"""With heads split over two processes, which communicate by gloo and shared memory, vLLM answers as `generate` does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from reminding import make_prompts, trained_export
from served import LENGTHS, Reference, answers, assert_same, engine, make_export, run

from liger_convert.utils.errors import BadInput

TEXTS = make_prompts(LENGTHS)
PROCESSES = 2


def served_by_two(monkeypatch: pytest.MonkeyPatch, export: Path) -> Any:
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[i % len(cores)]) for i in range(PROCESSES))  # vLLM's own is by memory nodes
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    return engine(export, tensor_parallel_size=PROCESSES, worker_extension_cls="parallel.Breakable")


def check(reference: Reference, outputs: list[Any]) -> None:
    for text, output in zip(TEXTS, outputs, strict=True):
        assert_same(answers(output)[0], reference.generate(text), reference.tolerance(text))


@pytest.mark.parametrize(
    ("layers", "mixer"),
    [
        ("hybrid", "gla"),
        pytest.param("linear", "gla", marks=pytest.mark.slow),
        pytest.param("hybrid", "liger-paper", marks=pytest.mark.slow),
    ],
)
def test_two_processes_answer_as_generate_does(layers: str, mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    export = trained_export(layers, mixer)
    reference = Reference(export)
    with served_by_two(monkeypatch, export) as llm:
        check(reference, run(llm, TEXTS, every=2))
        for rank in range(PROCESSES):
            llm.collective_rpc("lose_from_pages", args=("states", rank))
            lost = run(llm, TEXTS, name=f"lost{rank}-")
            llm.collective_rpc("mend_faults")
            with pytest.raises(AssertionError):
                check(reference, lost)
        check(reference, run(llm, TEXTS, name="mended"))
        if mixer == "gla":  # the other has no parameters of its own
            llm.collective_rpc("exchange_mixers")
            exchanged = run(llm, TEXTS, name="exchanged")
            with pytest.raises(AssertionError):
                check(reference, exchanged)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2", "mixtral"])
def test_families_on_two_processes(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = make_export(tmp_path, family, ["main", "softmax", "main"], type="gla")
    with served_by_two(monkeypatch, export) as llm:
        check(Reference(export), run(llm, TEXTS))


@pytest.mark.parametrize(("family", "mixer", "name"), [("llama", "retnet", "'retnet'"), ("phi3", "gla", "phi3 models")])
def test_what_cannot_be_split_is_refused_before_it_is_loaded(
    family: str, mixer: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = make_export(tmp_path, family, ["main", "softmax", "main"], type=mixer)
    with pytest.raises(BadInput, match=name), served_by_two(monkeypatch, export):
        pass
