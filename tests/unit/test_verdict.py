"""What the report says of a model follows from its numbers, and no sentence contradicts them."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from liger_convert.eval.verdict import verdict


def measured(ppl: float, copy: float | None) -> dict[str, Any]:
    values = {"text_ppl": ppl, "text_byte_ppl": 2.0, "copy_nll_32": 0.1, "copy_nll_256": copy}
    return {metric: {"value": value, "stderr": 0.1, "n": 9} for metric, value in values.items()}


@pytest.mark.parametrize(
    ("window_only", "used"),
    [
        (measured(20.0, 1.0), False),
        (measured(20.1, 1.05), False),
        (measured(20.1, 1.2), True),  # the copy loss alone
        (measured(20.3, 1.0), True),  # the text alone
        (measured(19.0, 0.5), False),  # a memory that harms is not used either
        (measured(20.0, None), True),  # with its memory ablated the model diverges
    ],
)
def test_the_memory_is_used_when_the_model_is_worse_without_it(window_only: dict[str, Any], used: bool) -> None:
    found = verdict({"linearized": measured(20.0, 1.0), "memory_ablated": window_only})
    assert found["memory_used"] is used
    assert found["sentences"][0].startswith("The memory is used") is used


@pytest.mark.parametrize(
    ("linearized", "says"),
    [
        (measured(28.9, 3.4), "THE MODEL IS NO BETTER than the untrained"),
        (measured(25.0, 1.0), "The model is better than the untrained"),
        (measured(35.0, 3.6), "THE MODEL IS WORSE than the untrained"),
        (measured(35.0, 1.0), "THE MODEL IS WORSE IN PART than the untrained"),
    ],
)
def test_the_verdict_compares_with_the_untrained_window(linearized: dict[str, Any], says: str) -> None:
    names = {"base": measured(23.0, 0.23), "window_only_untrained": measured(28.9, 3.42)}
    found = verdict(names | {"linearized": linearized, "memory_ablated": linearized})
    worse = "IS WORSE" in says
    assert found["sentences"][0 if worse else 1].startswith(says)
    assert found["worse_than_untrained"] is worse
    assert found["sentences"][2].startswith("Against the base the model is worse in text_ppl (")
    assert "against 0.23 ± 0.1)" in found["sentences"][2]


def test_of_two_models_that_diverge_neither_is_better() -> None:
    broken = {"text_ppl": {"value": None, "stderr": None, "n": 9}}
    found = verdict({"linearized": broken, "memory_ablated": broken, "window_only_untrained": broken})
    assert found["memory_used"] is False
    assert "NO BETTER" in found["sentences"][1]


def test_there_is_no_verdict_without_text_and_repetitions() -> None:
    tasks = {"piqa/acc": {"value": 0.5, "stderr": 0.1, "n": 9}}
    assert verdict({"linearized": tasks, "memory_ablated": tasks})["memory_used"] is None


def test_a_memory_that_helps_text_and_harms_copying_is_told_as_both() -> None:
    whole, alone = measured(20.0, 5.983), measured(30.0, 5.827)
    (sentence,) = verdict({"linearized": whole, "memory_ablated": alone})["sentences"]
    assert sentence == (
        "The memory is used, for better and for worse: with its memory ablated the model is worse in text_ppl "
        "(30 ± 0.1 against 20 ± 0.1); better in copy_nll_256 (5.827 ± 0.1 against 5.983 ± 0.1)."
    )


def test_texts_that_no_memory_is_read_in_say_nothing_of_the_memory() -> None:
    same, base = measured(20.0, 1.0), measured(19.0, 1.0)
    names = {"base": base, "window_only_untrained": same, "linearized": same, "memory_ablated": same}
    found = verdict(names, short={"text_ppl", "text_byte_ppl", "copy_nll_32", "copy_nll_256"}, reach=1028)
    assert found["memory_used"] is None
    assert found["sentences"][0] == (
        "WHETHER THE MEMORY IS USED IS NOT KNOWN: no text that was measured reaches beyond the window and its sinks "
        "(1,028 tokens), so no memory was read."
    )
    assert found["sentences"][1].startswith("THE MODEL IS NO BETTER than the untrained base")
    assert verdict(names, short={"text_ppl", "copy_nll_32"}, reach=260)["memory_used"] is False  # copy_nll_256 is long


@pytest.mark.parametrize("ablated", [measured(20.0, 1.0), measured(30.0, 5.0), measured(10.0, 0.1)])
def test_a_model_without_a_memory_is_never_said_to_use_one(ablated: dict[str, Any]) -> None:
    whole, tasks = measured(20.0, 1.0), {"piqa/acc": {"value": 0.5, "stderr": 0.1, "n": 9}}
    names = {"base": measured(19.0, 1.0), "window_only_untrained": whole, "linearized": whole}
    found = verdict(names | {"memory_ablated": ablated}, short={*whole}, has_memory=False)
    assert found["memory_used"] is False
    assert found["sentences"][0].startswith("THE MODEL HAS NO MEMORY: ")
    assert not [sentence for sentence in found["sentences"] if re.search("memory is used", sentence, re.IGNORECASE)]
    unmeasured = verdict({"linearized": tasks, "memory_ablated": tasks}, has_memory=False)
    assert unmeasured["memory_used"] is False
    assert unmeasured["sentences"][0] == found["sentences"][0]


def test_large_numbers_are_written_out() -> None:
    large = {"text_ppl": {"value": 713.81, "stderr": 156.57, "n": 4}}
    larger = {"text_ppl": {"value": 12345.6, "stderr": 1234.5, "n": 4}}
    (sentence,) = verdict({"linearized": large, "memory_ablated": larger})["sentences"]
    assert sentence.endswith("worse in text_ppl (12350 ± 1200 against 713.8 ± 160).")


def test_far_text_counts_as_much_as_near_text() -> None:
    def table(far: float) -> dict[str, Any]:
        return measured(20.0, 1.0) | {"text_far_ppl": {"value": far, "stderr": None, "n": 9}}

    found = verdict({"linearized": table(20.0), "memory_ablated": table(20.0), "window_only_untrained": table(19.0)})
    assert found["compared"]["against_untrained"]["text_far_ppl"] == "worse"
    assert found["sentences"][0].startswith("THE MODEL IS WORSE IN PART") is False
    assert found["sentences"][0].startswith("THE MODEL IS WORSE than the untrained base")


@pytest.mark.parametrize(("without_memory", "used"), [(3.02, True), (3.005, False)])
def test_the_loss_at_the_farthest_positions_counts_and_nearer_ones_do_not(without_memory: float, used: bool) -> None:
    """0.01 nats are 1 % of a perplexity."""

    def table(near: float, far: float) -> dict[str, Any]:
        positions = {"other_nll_at_1024": near, "other_nll_at_8192": far}
        return measured(20.0, 1.0) | {m: {"value": value, "stderr": 0.5, "n": 9} for m, value in positions.items()}

    found = verdict({"linearized": table(3.0, 3.0), "memory_ablated": table(3.5, without_memory)})
    assert found["memory_used"] is used
    assert f"in other_nll_at_8192 ({without_memory}" in found["sentences"][0] or not used
    assert "other_nll_at_1024" not in found["compared"]["memory_ablated"]


@pytest.mark.parametrize(("other", "first"), [(18.0, "THE MODEL IS NO BETTER"), (22.0, "THE MODEL IS WORSE than")])
def test_of_two_kinds_of_text_the_worse_one_is_told(other: float, first: str) -> None:
    def table(text: float, other: float) -> dict[str, Any]:
        values = {"text_ppl": text, "other_ppl": other, "other_byte_ppl": 2.0}
        return {metric: {"value": value, "stderr": None, "n": 9} for metric, value in values.items()}

    reference = table(20.0, 18.0)
    models = {"base": reference, "window_only_untrained": reference, "memory_ablated": table(30.0, other)}
    found = verdict(models | {"linearized": table(15.0, other)})
    assert found["compared"]["against_untrained"]["text_ppl"] == "better"
    said = [sentence for sentence in found["sentences"] if "untrained" in sentence or "Against the base" in sentence]
    assert said[0].startswith(first)
    assert all("in other_ppl (" in sentence and "text_ppl" not in sentence for sentence in said)
    assert found["worse_than_untrained"] is (other == 22.0)
    (memory,) = (sentence for sentence in found["sentences"] if "memory" in sentence)
    assert "worse in text_ppl (30 against 15); no different in other_ppl" in memory
    better = verdict(models | {"linearized": table(30.0, 9.0)})  # and the other way about
    assert "worse in text_ppl (30 against 20)" in better["sentences"][0]


def test_a_kind_of_text_counts_beside_its_own_length_alone() -> None:
    values = {"text_ppl": 10.0, "text_far_ppl": 10.0, "other_far_ppl": 30.0}
    models = {name: {m: {"value": 20.0, "stderr": None, "n": 9} for m in values} for name in ("base", "memory_ablated")}
    models["linearized"] = {m: {"value": value, "stderr": None, "n": 9} for m, value in values.items()}
    sentence = verdict(models)["sentences"][-1]
    assert (
        sentence
        == "Against the base the model is worse in other_far_ppl (30 against 20); better in text_ppl (10 against 20)."
    )


def number(said: str) -> float:
    return float("inf") if said == "not finite" else float(said.partition(" ± ")[0])


@pytest.mark.parametrize("seeds", [range(300), range(300, 600)])
def test_no_sentence_says_the_opposite_of_its_numbers(seeds: range) -> None:
    for seed in seeds:
        check(seed)


def check(seed: int) -> None:
    """A table drawn at random: what its sentences say, read back from their words."""
    rng = random.Random(seed)
    scale = 10 ** rng.uniform(0, 5)

    def value() -> float | None:
        near = scale * (1 + rng.choice([0, 0.001, 0.02, 1]) * rng.uniform(-1, 1))
        return rng.choice([near, near, near, near, near, None])

    def table() -> dict[str, Any]:
        return measured(value(), value()) | {"text_far_ppl": {"value": value(), "stderr": None, "n": 3}}  # type: ignore[arg-type]

    names = ["linearized", "memory_ablated", "window_ablated"]
    names += ["window_only_untrained"] * rng.randint(0, 1) + ["base"] * rng.randint(0, 1)
    found = verdict({name: table() for name in names})
    said: dict[str, set[str]] = {}
    for sentence in found["sentences"]:
        parts = re.findall(r"(worse|better|no different) in ((?:\w+ \([^)]*\)(?:, )?)+)", sentence)
        pairs = [
            (kind, *pair.split(" against ")) for kind, listed in parts for pair in re.findall(r"\(([^)]*)\)", listed)
        ]
        assert len(pairs) == 3, sentence
        for kind, one, other in pairs:
            assert kind == "no different" or (kind == "worse") == (number(one) > number(other)), sentence
            assert kind == "no different" or number(one) != number(other), sentence
        said[sentence] = {kind for kind, *_ in pairs}
        claim = sentence.partition(":")[0].lower()
        if "unused" in claim or "no better" in claim:
            assert said[sentence] == {"no different"}, sentence
        elif "worse than" in claim or "memory is used:" in sentence.lower():
            assert "better" not in said[sentence], sentence
            assert "worse" in said[sentence], sentence
        elif "better than" in claim or "harm" in claim:
            assert "worse" not in said[sentence], sentence
    (alone,) = (kinds for sentence, kinds in said.items() if "memory ablated" in sentence)
    assert found["memory_used"] is ("worse" in alone)
    beside = [kinds for sentence, kinds in said.items() if "untrained base" in sentence]
    assert found["worse_than_untrained"] is ("worse" in beside[0] if beside else None)
    assert found["sentences"][0].startswith("THE MODEL IS WORSE") is bool(found["worse_than_untrained"])
