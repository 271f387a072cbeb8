"""Losses that compute logits for a few tokens at a time equal those of all logits at once.

Shapes: B batch, T tokens, N = B * T, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from liger_convert.config.stages import DistillStage, Lora
from liger_convert.data.packed_rows import IGNORED
from liger_convert.mixers import resolve_spec
from liger_convert.model import linearized_config
from liger_convert.model.configuration import FORMAT
from liger_convert.model.families import FAMILIES
from liger_convert.model.output_head import OutputHead
from liger_convert.training import losses
from liger_convert.training.distill import DistillObjective
from liger_convert.training.finetune import FinetuneObjective
from liger_convert.training.student import add_lora
from tests.support.tiny import tiny_config

PECULIAR: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 4.0},
}


def models(model_type: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """A base of one layer, and a linearized model with other weights."""
    config = tiny_config(model_type, num_hidden_layers=1, **(PECULIAR.get(model_type, {}) | changes))
    spec = resolve_spec({"type": "gla", "window": 4, "codes": 8}, "mixer")
    linear = linearized_config(config, {"format": FORMAT, "mixers": {"main": spec}, "layers": ["main"]})
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    return base, AutoModelForCausalLM.from_config(linear).train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 101, (2, 13), generator=generator)
    labels = ids.clone()
    labels[torch.rand(2, 13, generator=generator) < 0.3] = IGNORED
    return {"input_ids": ids, "labels": labels}


def stage(**changes: Any) -> DistillStage:
    given = {"data": "text", "tokens": 10_000, "kl_weight": 0.7, "ce_weight": 0.3, "temperature": 1.7}
    return DistillStage.model_validate({"kind": "distill", "learning_rates": {"mixer": 1e-3}} | given | changes)


def written_out(student_BTV: Tensor, teacher_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The loss of `stage()`, of logits in any dtype."""
    keep = labels_BT[:, 1:] != IGNORED
    student_NV, teacher_NV, next_N = student_BTV[:, :-1][keep], teacher_BTV[:, :-1][keep], labels_BT[:, 1:][keep]
    p_NV, log_q_NV = (teacher_NV / 1.7).softmax(-1), (student_NV / 1.7).log_softmax(-1)
    kl = (p_NV * (p_NV.log() - log_q_NV)).sum() * 1.7**2
    return 0.7 * kl + 0.3 * F.cross_entropy(student_NV, next_N, reduction="sum")


@pytest.fixture(params=[101 * 4, 101 * 5 + 7, 1, 1 << 20], ids=["even", "odd", "tokens", "whole"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.HEAD_LOGITS, "cpu", request.param)
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 101 * 3)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_value_and_gradients_are_as_near_to_float64_as_those_of_whole_logits(softcap: float | None, bias: bool) -> None:
    torch.manual_seed(0)
    hidden_NC, weight_VC, bias_V, teacher_NV = (
        torch.randn(shape) for shape in ((26, 19), (101, 19), (101,), (26, 101))
    )
    next_N = losses.next_tokens(batch()["labels"])
    given = [hidden_NC, weight_VC, *([bias_V] if bias else [])]

    def whole(*x: Tensor) -> Tensor:
        logits_NV = OutputHead(x[1], x[2] if bias else None, 2.0, softcap).logits(x[0])
        kept, taught = (y.unflatten(0, (2, 13)) for y in (logits_NV, teacher_NV.to(logits_NV)))
        return written_out(kept, taught, batch()["labels"])

    def chunked(*x: Tensor) -> Tensor:
        def loss(piece_NV: Tensor, at: slice) -> Tensor:
            kl = losses.kl_divergence(piece_NV, teacher_NV[at], next_N[at], 1.7)
            return 0.7 * kl + 0.3 * losses.cross_entropy(piece_NV, next_N[at])

        return losses.summed(x[0], loss, OutputHead(x[1], x[2] if bias else None, 2.0, softcap))

    def run(call: Any, dtype: torch.dtype) -> list[Tensor]:
        x = [y.to(dtype).requires_grad_() for y in given]
        value = call(*x)
        return [value.detach(), *torch.autograd.grad(3 * value, x)]

    for exact, plain, ours in zip(
        run(whole, torch.float64), run(whole, torch.float32), run(chunked, torch.float32), strict=True
    ):
        chunks = -(-26 // max(1, losses.HEAD_LOGITS["cpu"] // 101))  # each of which is added, and rounds once
        rounding = chunks * torch.finfo(torch.float32).eps / 2 * exact.abs().max()
        assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + rounding


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(base: Any, model: Any) -> None:
    """Loss and gradients of a distillation are those of the models' own logits."""
    x = batch()
    ours = DistillObjective(base, stage())(model, x)
    found = gradients(model, ours)
    inputs = {"input_ids": x["input_ids"], "use_cache": False}
    plain = written_out(model(**inputs).logits, base(**inputs).logits, x["labels"])
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(found, gradients(model, plain), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_familys_logits_are_those_of_the_model(model_type: str) -> None:
    base, model = models(model_type)
    assert OutputHead.of(model) is not None
    check(base, model)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_heads_get_both_gradients(tied: bool) -> None:
    base, model = models(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    check(base, model)


@pytest.mark.parametrize("model_type", PECULIAR)
def test_a_head_without_its_bound_is_found(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputHead, "bounded", lambda self, product_NV: product_NV)
    with pytest.raises(AssertionError):
        check(*models(model_type))


def test_adapters_on_the_head_are_run_by_the_model() -> None:
    base, model = models()
    model = add_lora(model, Lora(rank=2, targets=["lm_head", "q_proj"]), train_mixer=False)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    assert OutputHead.of(model.get_base_model()) is None
    check(base, model)


def test_autocast_multiplies_in_its_dtype_and_adds_up_in_float32() -> None:
    base, model = models()
    inputs = {"input_ids": batch()["input_ids"], "use_cache": False}

    def plain() -> Tensor:
        return written_out(model(**inputs).logits.float(), base(**inputs).logits.float(), batch()["labels"])

    exact = gradients(model, plain())
    with torch.autocast("cpu", torch.bfloat16):
        ours, whole = DistillObjective(base, stage())(model, batch()), plain()
    torch.testing.assert_close(ours, whole, atol=0, rtol=1e-3)
    found, rounded = gradients(model, ours), gradients(model, whole)
    assert found["lm_head.weight"].dtype == torch.float32
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() <= 2 * (rounded[name] - gradient).norm() + 1e-6, name


class LargestLogits(TorchDispatchMode):
    """Of how many tokens a tensor is at most whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and x.shape[-1:] == (101,) and x.is_contiguous():  # no weights, turned
                self.tokens = max(self.tokens, x.numel() // 101)
        return made


@pytest.mark.parametrize("kind", ["distill", "finetune"])
def test_there_are_never_the_logits_of_all_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.HEAD_LOGITS, "cpu", 101 * 2)
    base, model = models()
    objective: Any = DistillObjective(base, stage()) if kind == "distill" else FinetuneObjective()

    def tokens() -> int:
        with LargestLogits() as largest:
            objective(model, batch()).backward()
        return largest.tokens

    assert tokens() <= 2
    monkeypatch.setitem(losses.HEAD_LOGITS, "cpu", 1 << 20)  # control: all in one chunk
    assert tokens() == 26
