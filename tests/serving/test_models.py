"""Every mixer and every family is served as `generate` runs it, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served import (
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

from liger_convert.mixers import MIXERS
from liger_convert.model.families import FAMILIES
from liger_convert.utils.errors import BadInput

TEXTS = prompts([2, 19, 64, 150])
HYBRID = ["main", "softmax", "main"]
SHARE = {"ministral3": 12}  # its queries grow with the position, and with them the weight of the window
QUICK = {"mixers": {"gated-deltanet", "gsa", "mom"}, "families": {"gemma3_text", "olmoe", "stablelm"}}


def some(names: Any, quick: set[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def assert_served(export: Path, has_state: bool = True) -> None:
    """Checks that vLLM's answers and prompt log-probabilities equal those of the project's own code, and that they do
    not if the states are lost."""
    reference = Reference(export)
    tolerances = [reference.tolerance(text) for text in TEXTS]
    wanted = [reference.score_prompt(text) for text in TEXTS]

    def assert_same_prompts(outputs: list[Any]) -> None:
        for output, scores, tolerance in zip(outputs, wanted, tolerances):
            assert (prompt_logprobs(output) - scores).abs().max() <= tolerance

    with engine(export) as llm:
        served = run(llm, TEXTS, sampling(prompt_logprobs=0), every=2)
        with broken(lose("states")) as broke:
            lost = run(llm, TEXTS, sampling(prompt_logprobs=0), every=2, name="lost")
    for text, output, tolerance in zip(TEXTS, served, tolerances):
        assert_same(answers(output)[0], reference.generate(text), tolerance)
    assert_same_prompts(served)
    assert any(broke) == has_state
    if has_state:
        with pytest.raises(AssertionError):
            assert_same_prompts(lost)


@pytest.mark.parametrize("mixer", some(MIXERS, QUICK["mixers"]))
def test_every_mixer_is_served_as_generate_runs_it(mixer: str, tmp_path: Path) -> None:
    options = {"sinks": 0} if mixer == "forgetting" else {}
    export = make_export(tmp_path, "llama", ["main"] * 3, type=mixer, **options)
    assert_served(export, has_state=mixer not in ("window", "forgetting"))


@pytest.mark.parametrize("family", some(FAMILIES, QUICK["families"]))
def test_every_family_is_served_as_generate_runs_it(family: str, tmp_path: Path) -> None:
    assert_served(make_export(tmp_path, family, HYBRID, SHARE.get(family, 4), type="gla"))


def test_an_unlimited_window_is_refused_and_its_mixer_named(tmp_path: Path) -> None:
    export = make_export(tmp_path, "llama", HYBRID, type="forgetting", window=0, sinks=0)
    with pytest.raises(BadInput, match="'forgetting'"), engine(export):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2},
        {"enable_lora": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    ],
)
def test_what_is_not_supported_is_refused_in_a_sentence(options: dict[str, Any], tmp_path: Path) -> None:
    export = make_export(tmp_path, "llama", HYBRID, type="gla")
    with pytest.raises(BadInput, match=next(iter(options))), engine(export, **options):
        pass
