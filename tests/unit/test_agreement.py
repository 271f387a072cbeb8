"""Agreement with the base: the base agrees fully with itself, and another model is compared by its own greedy text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_tiny_base, tiny_tokenizer

from liger_convert.data.documents import Document
from liger_convert.eval import ablation
from liger_convert.eval.ablation import diagnose
from liger_convert.eval.agreement import CHAT, agreement, write_rows
from liger_convert.eval.evaluation import evaluate_model
from liger_convert.eval.generation import load_model
from liger_convert.eval.suites import AgreementMeasure, Suite
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base
from liger_convert.utils.errors import BadInput

CPU = torch.device("cpu")
CONTEXT = 1024
MEASURE = AgreementMeasure(prompts=4, prompt_tokens=24, tokens=12)
IDS = np.random.default_rng(0).integers(3, 101, 400, dtype=np.int32)
TEXT = [Document(IDS, np.ones(len(IDS), bool), len(IDS))]
SUITE = Suite.model_validate(
    {"name": "test", "description": "a test", "agreement": {"prompts": 4, "prompt_tokens": 24, "tokens": 12}}
)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"), max_position_embeddings=CONTEXT)


@pytest.fixture
def base(base_dir: Path) -> Any:
    return load_model(base_dir, CPU, "float32")


def quiet(done: float, total: float | None, note: str = "") -> None:
    pass


def written(model: Any, tokenizer: Any = None, context: int = CONTEXT) -> list[Any]:
    tokenizer = tokenizer or tiny_tokenizer()
    options: dict[str, Any] = {"batch_size": 3, "dtype": torch.float32, "report": quiet}
    return write_rows(model, tokenizer, TEXT, MEASURE, context=context, **options)


def agree(model: Any, rows: list[Any]) -> dict[str, Any]:
    return agreement(model, rows, dtype=torch.float32, report=quiet)


def jolted(model: Any, size: float) -> Any:
    """The model with slightly changed weights, so that it agrees only partly with the original."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * weight.std() * torch.randn_like(weight))
    return model


def test_the_base_agrees_with_all_that_it_wrote(base: Any) -> None:
    rows = written(base)
    found = agree(base, rows)
    sizes = [len(row["said"]) for row in rows]
    assert found["agreement/greedy_match"] == {"value": 1.0, "stderr": 0.0, "n": 7}
    assert found["agreement/chat_match"] == {"value": 1.0, "stderr": 0.0, "n": 3}
    assert found["agreement/common_prefix"]["value"] == pytest.approx(np.mean(sizes))
    assert max(sizes) == MEASURE.tokens


@pytest.mark.parametrize("settings", [{"repetition_penalty": 5.0}, {"num_beams": 3}, {"max_time": 1e-9}])
def test_what_the_base_writes_is_its_greedy_text_whatever_its_settings_are(base: Any, settings: dict[str, Any]) -> None:
    base.generation_config.update(**settings)
    for row in written(base):
        ids, start = row["ids"], row["start"]
        with torch.no_grad():
            said = [base(torch.tensor([ids[:end]])).logits[0, -1].argmax().item() for end in range(start, len(ids))]
        assert ids[start:] == said == row["said"]
        assert 2 not in ids[start:-1]  # nothing stands behind the end of a text
        assert len(said) == MEASURE.tokens or said[-1] == 2


def test_the_common_prefix_is_that_of_the_models_own_greedy_text(base_dir: Path, base: Any) -> None:
    rows, model = written(base), jolted(load_model(base_dir, CPU, "float32"), 0.05)
    found = agree(model, rows)
    prefixes, same = [], []
    for row in rows:
        prompt, expected = torch.tensor([row["ids"][: row["start"]]]), row["ids"][row["start"] :]
        own = model.generate(prompt, max_new_tokens=len(expected), do_sample=False, pad_token_id=0)[0, row["start"] :]
        differs = [i for i, (one, other) in enumerate(zip(own.tolist(), expected)) if one != other]
        prefixes.append(differs[0] if differs else len(expected))
        with torch.no_grad():
            forced = model(torch.tensor([row["ids"]])).logits[0, row["start"] - 1 : -1].argmax(-1)
        same += [one == other for one, other in zip(forced.tolist(), expected)]
    assert found["agreement/common_prefix"]["value"] == pytest.approx(np.mean(prefixes))
    assert found["agreement/greedy_match"]["value"] == pytest.approx(np.mean(same))
    assert 0 < np.mean(same) < 1


def test_a_chat_template_with_a_token_that_the_model_lacks_leaves_out_the_conversation(base: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"])
    tokenizer.embeddings = len(tokenizer) - 1
    assert [row["chat"] for row in written(base, tokenizer)] == [False] * 4 + [True] * 3
    tokenizer.chat_template = "<image>" + tokenizer.chat_template
    assert [row["chat"] for row in written(base, tokenizer)] == [False] * 4


def test_agreement_falls_with_every_jolt_and_with_the_words_in_another_order(base_dir: Path, base: Any) -> None:
    rows = written(base)
    matches = [1.0]
    for size in (0.02, 0.2):
        found = agree(jolted(load_model(base_dir, CPU, "float32"), size), rows)
        matches.append(found["agreement/greedy_match"]["value"])
    assert matches[0] > matches[1] > matches[2]
    shuffled = [row | {"said": random.Random(0).sample(row["said"], len(row["said"]))} for row in rows]
    assert agree(base, shuffled)["agreement/greedy_match"]["value"] < 0.7


def test_each_turn_of_the_conversation_stands_behind_the_answers_before_it(base: Any) -> None:
    tokenizer = tiny_tokenizer()
    turns = [row for row in written(base) if row["chat"]]
    assert len(turns) == len(CHAT) == 3
    for number, row in enumerate(turns):
        asked = tokenizer.decode(row["ids"][: row["start"]])
        assert [question in asked for question in CHAT] == [i <= number for i in range(3)]
        for before in turns[:number]:
            answer = tokenizer.decode(before["ids"][before["start"] :], skip_special_tokens=True).strip()
            assert answer in asked


def test_turns_that_do_not_fit_and_conversations_that_a_template_refuses_are_left_out(base: Any) -> None:
    first = next(row for row in written(base) if row["chat"])["start"]
    assert sum(row["chat"] for row in written(base, context=first + MEASURE.tokens)) == 1
    assert sum(row["chat"] for row in written(base, context=first + MEASURE.tokens - 1)) == 0
    plain, single = tiny_tokenizer(), tiny_tokenizer()
    plain.chat_template = None
    single.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"
    )
    assert [row["chat"] for row in written(base, plain)] == [False] * 4
    assert "agreement/chat_match" not in agree(base, written(base, plain))
    assert sum(row["chat"] for row in written(base, single)) == 1


def test_too_little_text_to_begin_with_is_bad_input(base: Any) -> None:
    options: dict[str, Any] = {"context": CONTEXT, "batch_size": 1, "dtype": torch.float32, "report": quiet}
    with pytest.raises(BadInput, match="text of another kind: 400 tokens are too few for two spans of 300"):
        write_rows(base, tiny_tokenizer(), TEXT, AgreementMeasure(prompt_tokens=300), **options)


def test_without_what_a_base_wrote_there_is_no_agreement(base: Any) -> None:
    assert evaluate_model(base, tiny_tokenizer(), SUITE, other=TEXT, precision="float32") == {}


@pytest.fixture(scope="module")
def model_dir(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linearized")
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 6, "sinks": 2})}, "layers": ["main"] * 3}
    linearize_base(base_dir, plan).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_diagnosis_asks_all_models_about_what_the_base_wrote_once(
    base_dir: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"held_out": None, "other": TEXT, "device": CPU, "precision": "float32"}
    times = []
    original = ablation.let_base_write
    monkeypatch.setattr(ablation, "let_base_write", lambda *a, **o: times.append(1) or original(*a, **o))
    found = diagnose(model_dir, base_dir, SUITE, keep=tmp_path, **options)
    match = {name: measured["agreement/greedy_match"]["value"] for name, measured in found["models"].items()}
    assert len(times) == 1
    assert match["base"] == 1
    assert match["memory_ablated"] == match["window_only_untrained"] < 1
    assert "notes" not in found
    (tmp_path / "linearized.json").unlink()  # the next attempt measures this one alone, on the same text
    assert diagnose(model_dir, base_dir, SUITE, keep=tmp_path, **options) == found
    assert len(times) == 1


def test_a_diagnosis_without_a_base_leaves_agreement_out_and_says_so(model_dir: Path) -> None:
    options: dict[str, Any] = {"held_out": None, "other": TEXT, "device": CPU, "precision": "float32"}
    found = diagnose(model_dir, None, SUITE, **options)
    assert found["models"]["linearized"] == {}
    assert found["notes"] == [
        "agreement: left out because there is no base to agree with; name one with --base or --baseline"
    ]


@pytest.mark.slow  # starts two processes
def test_side_by_side_the_models_agree_as_they_do_one_by_one(base_dir: Path, model_dir: Path) -> None:
    options: dict[str, Any] = {"held_out": None, "other": TEXT, "device": CPU, "precision": "float32"}
    found = diagnose(model_dir, base_dir, SUITE, processes=2, **options)
    assert found == diagnose(model_dir, base_dir, SUITE, **options)
