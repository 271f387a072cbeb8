"""Our own measures, compared with direct computations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import closing_tokenizer, tiny_config, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy, one_hot
from transformers import AutoModelForCausalLM, Gemma2Config
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from liger_convert.data.documents import Document
from liger_convert.eval import measures
from liger_convert.eval.measures import (
    copy_loss,
    measurement,
    position_losses,
    text_perplexity,
    token_losses,
    worse_than_frequencies,
)
from liger_convert.eval.suites import CopyMeasure, PositionMeasure, TextMeasure
from liger_convert.io.tokenizer import text_prefix
from liger_convert.utils.errors import BadInput

OPTIONS: dict[str, Any] = {"batch_size": 2, "dtype": torch.float32, "report": lambda done, total, note="": None}
TEXT = "A sentence of printable ASCII, told again and again in other words: 0123456789 (and so on)."


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("llama")).eval()


def document(ids: list[int]) -> Document:
    return Document(np.array(ids, np.int32), np.ones(len(ids), bool), 0)


def documents(tokenizer: Any, *texts: str) -> list[Document]:
    plain = [document(tokenizer(text)["input_ids"]) for text in texts]
    return [replace(one, begin=len(text_prefix(tokenizer))) for one in plain]


def with_bos(tokenizer: Any) -> Any:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@torch.no_grad()
def losses_by_hand(model: Any, ids: list[int]) -> list[float]:
    """The loss of every token but the first, one position at a time."""
    rows = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [-rows[i, ids[i + 1]].item() for i in range(len(ids) - 1)]


class Successor(torch.nn.Module):
    """A language model that is sure that token i + 1 follows token i, and knows nothing else."""

    device, sure = torch.device("cpu"), 50.0

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Identity()
        self.model.forward = lambda input_ids, use_cache: BaseModelOutputWithPast(
            last_hidden_state=self.sure * one_hot(input_ids + 1, 101).float()
        )

    def get_decoder(self) -> torch.nn.Module:
        return self.model

    def forward(self, inputs_embeds: torch.Tensor, use_cache: bool) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.model(inputs_embeds, use_cache=use_cache).last_hidden_state)


class Recaller(Successor):
    """A language model that predicts what followed the same token before, at most `reach` tokens back. If there was no
    such token, all tokens are equally likely to it."""

    def __init__(self, reach: int) -> None:
        super().__init__()

        def forward(input_ids: torch.Tensor, use_cache: bool) -> BaseModelOutputWithPast:
            logits = torch.zeros(*input_ids.shape, 101)
            for row, ids in enumerate(input_ids.tolist()):
                for i, token in enumerate(ids):
                    before = [j for j in range(max(0, i - reach), i) if ids[j] == token]
                    if before:
                        logits[row, i, ids[before[-1] + 1]] = self.sure
            return BaseModelOutputWithPast(last_hidden_state=logits)

        self.model.forward = forward


def test_perplexity_is_that_of_a_computation_by_hand(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    found = text_perplexity(
        model, tokenizer, documents(tokenizer, TEXT, TEXT[::-1]), TextMeasure(window=20, windows=5), **OPTIONS
    )
    stream = tokenizer(TEXT + TEXT[::-1])["input_ids"]
    losses = [losses_by_hand(model, stream[i : i + 20]) for i in range(0, 100, 20)]
    means = np.mean(losses, axis=1)
    assert found["text_ppl"]["value"] == pytest.approx(math.exp(means.mean()))
    assert found["text_ppl"]["stderr"] == pytest.approx(
        math.exp(means.mean()) * means.std(ddof=1) / math.sqrt(5), rel=1e-6
    )
    assert found["text_ppl"]["n"] == 5
    # every token of this tokenizer is one byte
    assert found["text_byte_ppl"] == pytest.approx(found["text_ppl"])


def test_perplexity_from_a_later_position_scores_only_what_follows_it(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    measure = TextMeasure(name="late", window=20, windows=2, score_from=15)
    found = text_perplexity(model, tokenizer, documents(tokenizer, TEXT), measure, **OPTIONS)
    stream = tokenizer(TEXT)["input_ids"]
    late = [loss for i in (0, 20) for loss in losses_by_hand(model, stream[i : i + 20])[14:]]
    assert found["late_ppl"]["value"] == pytest.approx(math.exp(np.mean(late)))


def test_bytes_are_counted_in_the_text_and_not_in_the_tokens(model: Any) -> None:
    class Wide:
        """Every token stands for a character of 3 bytes."""

        bos_token_id = None

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": []}

        def decode(self, ids: list[int], **_: Any) -> str:
            return "€" * len(ids)

    found = text_perplexity(model, Wide(), [document(list(range(5, 95)))], TextMeasure(window=30), **OPTIONS)
    assert found["text_byte_ppl"]["value"] == pytest.approx(found["text_ppl"]["value"] ** (1 / 3))


def test_every_window_begins_as_the_tokenizer_begins_a_text(model: Any) -> None:
    tokenizer = with_bos(tiny_tokenizer())
    found = text_perplexity(
        model, tokenizer, documents(tokenizer, TEXT[:45], TEXT[45:]), TextMeasure(window=21), **OPTIONS
    )
    stream = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    losses = [loss for i in range(0, 80, 20) for loss in losses_by_hand(model, [1, *stream[i : i + 20]])]
    assert found["text_ppl"]["n"] == 4
    assert found["text_ppl"]["value"] == pytest.approx(math.exp(np.mean(losses)))
    assert found["text_byte_ppl"]["value"] == pytest.approx(found["text_ppl"]["value"])


def test_a_beginning_of_several_tokens_is_in_every_window_and_not_in_the_text(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    two = [("<pad>", 0), ("<s>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> <s> $A", special_tokens=two)
    texts = documents(tokenizer, TEXT[:45], TEXT[45:])
    stream = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    losses = [losses_by_hand(model, [0, 1, *stream[i : i + 20]])[1:] for i in range(0, 80, 20)]
    found = text_perplexity(model, tokenizer, texts, TextMeasure(window=22), **OPTIONS)
    assert found["text_ppl"]["value"] == pytest.approx(math.exp(np.mean(losses)))
    assert found["text_byte_ppl"]["value"] == pytest.approx(found["text_ppl"]["value"])
    copies = [losses_by_hand(model, [0, 1, *stream[i : i + 12] * 2])[-11:] for i in (0, len(stream) // 2)]
    found = copy_loss(model, tokenizer, texts, CopyMeasure(length=12, draws=2), **OPTIONS)
    assert found["copy_nll_12"]["value"] == pytest.approx(np.mean(copies))
    with pytest.raises(BadInput, match="the 2 tokens that begin every text leave no room in a window of 2"):
        text_perplexity(model, tokenizer, texts, TextMeasure(window=2), **OPTIONS)


def test_a_token_behind_every_text_begins_no_window(model: Any) -> None:
    """Not even where it is the same that begins a text."""
    tokenizer = closing_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    stream = tokenizer(TEXT)["input_ids"]
    losses = [losses_by_hand(model, stream[i : i + 20]) for i in range(0, 80, 20)]
    found = text_perplexity(model, tokenizer, documents(tokenizer, TEXT), TextMeasure(window=20, windows=4), **OPTIONS)
    assert found["text_ppl"]["value"] == pytest.approx(math.exp(np.mean(losses)))


def test_the_copy_loss_is_the_mean_loss_of_the_repetition(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    found = copy_loss(model, tokenizer, documents(tokenizer, TEXT), CopyMeasure(length=12, draws=3), **OPTIONS)
    stream = tokenizer(TEXT)["input_ids"]
    spans = [stream[start : start + 12] for start in (0, len(stream) // 3, 2 * (len(stream) // 3))]
    draws = [np.mean(losses_by_hand(model, x + x)[12:]) for x in spans]
    assert found["copy_nll_12"]["value"] == pytest.approx(np.mean(draws))
    assert found["copy_nll_12"]["stderr"] == pytest.approx(np.std(draws, ddof=1) / math.sqrt(3), rel=1e-5)
    assert found["copy_nll_12"]["n"] == 3


def test_a_model_that_cannot_know_of_the_repetition_is_not_charged_for_its_first_token() -> None:
    stream = document(list(range(10, 90)))
    found = copy_loss(Successor(), tiny_tokenizer(), [stream], CopyMeasure(length=10, draws=4), **OPTIONS)
    assert found["copy_nll_10"] == {"value": pytest.approx(0), "stderr": pytest.approx(0), "n": 4}


def test_a_recall_curve_ends_where_the_memory_does() -> None:
    stream = document([3 + (7 * i) % 97 for i in range(97)])  # no token twice

    def curve(reach: int) -> list[float]:
        lengths = CopyMeasure(lengths=[8, 16, 32], draws=3).each
        found = [copy_loss(Recaller(reach), tiny_tokenizer(), [stream], one, **OPTIONS) for one in lengths]
        assert [set(measured) for measured in found] == [{"copy_nll_8"}, {"copy_nll_16"}, {"copy_nll_32"}]
        return [value for measured in found for one in measured.values() if (value := one["value"]) is not None]

    nothing, short, long = curve(0), curve(16), curve(32)
    assert nothing == pytest.approx([math.log(101)] * 3)  # a zeroed memory knows no length
    assert short == pytest.approx([0, 0, math.log(101)], abs=1e-6)
    assert long == pytest.approx([0, 0, 0], abs=1e-6)


def test_the_loss_by_position_is_that_of_a_computation_by_hand(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    text = "".join(chr(33 + (i * i + i // 7) % 90) for i in range(1300))
    found = position_losses(
        model, tokenizer, documents(tokenizer, text), PositionMeasure(window=600, windows=2), **OPTIONS
    )
    stream = tokenizer(text)["input_ids"]
    losses = [losses_by_hand(model, stream[i : i + 512]) for i in (0, 600)]
    assert set(found) == {"text_nll_at_256", "text_nll_at_512"}
    for metric, span in (("text_nll_at_256", slice(0, 255)), ("text_nll_at_512", slice(255, 511))):
        means = [np.mean(row[span]) for row in losses]
        assert found[metric]["value"] == pytest.approx(np.mean(means), rel=1e-5)
        assert found[metric]["stderr"] == pytest.approx(abs(means[0] - means[1]) / 2, rel=1e-3)
        assert found[metric]["n"] == 2


def test_a_text_too_short_for_two_windows_is_read_in_shorter_ones(model: Any) -> None:
    tokenizer, text = tiny_tokenizer(), "".join(chr(33 + i % 90) for i in range(1300))
    shorter, whole = (
        position_losses(
            model, tokenizer, documents(tokenizer, text), PositionMeasure(window=window, windows=2), **OPTIONS
        )
        for window in (8192, 650)
    )
    assert shorter == whole
    assert set(shorter) == {"text_nll_at_256", "text_nll_at_512"}


def test_a_model_that_reaches_no_further_is_found_out_by_position() -> None:
    stream = document([3 + i % 97 for i in range(97)] * 12)  # a text that comes again after 97 tokens
    measure = PositionMeasure(source="other", window=512, windows=2)
    near, far = (position_losses(Recaller(reach), tiny_tokenizer(), [stream], measure, **OPTIONS) for reach in (20, 97))
    assert far["other_nll_at_512"]["value"] == pytest.approx(0, abs=1e-6)
    assert near["other_nll_at_512"]["value"] == pytest.approx(math.log(101))


def test_uniform_copies_are_the_same_in_every_run_and_hold_no_special_token(model: Any, monkeypatch: Any) -> None:
    tokenizer, seen = tiny_tokenizer(), []
    original = measures.token_losses
    monkeypatch.setattr(measures, "token_losses", lambda model, ids: seen.append(ids) or original(model, ids))
    measure = CopyMeasure(length=40, draws=4, tokens="uniform")
    first, second = (copy_loss(model, tokenizer, [], measure, **OPTIONS) for _ in range(2))
    assert first == second
    assert set(first) == {"copy_uniform_nll_40"}
    assert not set(torch.cat(seen).unique().tolist()) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize("family", ["llama", "granite", "mixtral", "gemma2"])
def test_losses_by_chunks_are_those_of_all_logits_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values = tiny_config("gemma").to_dict()
    config = Gemma2Config(**values | {"model_type": "gemma2"}) if family == "gemma2" else tiny_config(family)
    if family == "granite":
        config.logits_scaling = 4.0
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 101, (3, 19))
    monkeypatch.setattr(measures, "LOGIT_ROWS", 7)
    with torch.no_grad():
        expected = cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        torch.testing.assert_close(token_losses(model, ids), expected, atol=1e-5, rtol=1e-5)
        assert model(ids).logits.shape == (3, 19, 101)  # and the model is whole again


def test_no_tensor_holds_the_logits_of_all_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(measures, "LOGIT_ROWS", 7)
    hook = model.lm_head.register_forward_hook(lambda module, args, logits: sizes.append(logits.numel() // 101))
    with torch.no_grad():
        token_losses(model, torch.randint(3, 101, (3, 19)))
    hook.remove()
    assert max(sizes) == 7
    assert sum(sizes) == 3 * 18


def test_what_is_not_finite_becomes_null() -> None:
    assert measurement(math.inf, math.nan, 3) == {"value": None, "stderr": None, "n": 3}
    assert measurement(1.5, None, 3) == {"value": 1.5, "stderr": None, "n": 3}


@pytest.mark.parametrize(
    ("function", "measure", "kind"),
    [
        (text_perplexity, TextMeasure(window=64), "held-out text"),
        (text_perplexity, TextMeasure(source="other", window=64), "text of another kind"),
        (position_losses, PositionMeasure(window=256), "held-out text"),
        (copy_loss, CopyMeasure(length=64), "held-out text"),
    ],
)
def test_too_little_text_is_bad_input(model: Any, function: Any, measure: Any, kind: str) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(BadInput, match=f"^{kind}: 91 tokens"):
        function(model, tokenizer, documents(tokenizer, TEXT), measure, **OPTIONS)


@pytest.mark.parametrize(("value", "told"), [(3.99, None), (4.01, "is 4.01, "), (None, "is not finite, ")])
def test_a_base_that_knows_less_than_the_frequencies_of_tokens_is_told(value: float | None, told: str | None) -> None:
    """As one whose tokenizer is not its own. Four tokens that are all as frequent give a perplexity of 4."""
    documents = [document([3, 4, 5, 6] * 33)]
    measure = TextMeasure(window=33, windows=4)
    found: Any = {"value": value, "stderr": 0.1, "n": 4}
    said = worse_than_frequencies(found, tiny_tokenizer(), documents, measure)
    assert said is None if told is None else told + "where the frequencies of tokens give 4: its tokenizer or" in said
