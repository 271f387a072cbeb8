"""Every mixer and every family is served as `generate` runs it, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served import Reference, answers, assert_same, engine, make_export, prompts, run

from liger_convert.mixers import MIXERS
from liger_convert.model.families import FAMILIES
from liger_convert.utils.errors import BadInput

TEXTS = prompts([1, 19, 64, 150])
HYBRID = ["main", "softmax", "main"]
QUICK = {"mixers": {"gated-deltanet", "gsa", "mom"}, "families": {"gemma3_text", "olmoe", "stablelm"}}


def some(names: Any, quick: set[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def assert_served(export: Path) -> None:
    reference = Reference(export)
    with engine(export) as llm:
        outputs = run(llm, TEXTS, every=2)
    for text, output in zip(TEXTS, outputs):
        assert_same(answers(output)[0], reference.generate(text), reference.tolerance(text))


@pytest.mark.parametrize("mixer", some([name for name in MIXERS if name != "forgetting"], QUICK["mixers"]))
def test_mixer(mixer: str, tmp_path: Path) -> None:
    assert_served(make_export(tmp_path, "llama", ["main"] * 3, type=mixer))


@pytest.mark.parametrize("family", some(FAMILIES, QUICK["families"]))
def test_family(family: str, tmp_path: Path) -> None:
    assert_served(make_export(tmp_path, family, HYBRID, type="gla"))


def test_a_window_without_an_end_is_refused_by_name(tmp_path: Path) -> None:
    export = make_export(tmp_path, "llama", HYBRID, type="forgetting", window=0, sinks=0)
    with pytest.raises(BadInput, match="'forgetting'"), engine(export):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"enable_lora": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    ],
)
def test_what_is_not_supported_is_refused_in_a_sentence(options: dict[str, Any], tmp_path: Path) -> None:
    export = make_export(tmp_path, "llama", HYBRID, type="gla")
    with pytest.raises(BadInput, match=next(iter(options))), engine(export, **options):
        pass
