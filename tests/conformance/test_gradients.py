"""Gradients reach every parameter, with and without checkpointing. Alignment targets are the base's own attention
outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import TOKENS, base_folder
from transformers import AutoModelForCausalLM

from liger_convert.model import collect_align_targets


def test_gradient_checkpointing_gives_the_same_gradients_and_all_of_them(model: Any) -> None:
    model.train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.gradient_checkpointing_disable()
    model.eval().zero_grad()
    plain, checkpointed_ = gradients
    assert plain.keys() == checkpointed_.keys()
    assert all(plain[name].any() for name, _ in model.named_parameters() if ".mixer." in name)
    for name in plain:
        torch.testing.assert_close(plain[name], checkpointed_[name], rtol=1e-4, atol=1e-6)


def test_other_tensors_may_stand_in_for_the_parameters(model: Any) -> None:
    """They do in the replicas of `nn.DataParallel`, which `Trainer` uses on several GPUs, and in `functional_call`."""
    model.train().zero_grad()
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    inputs = {"labels": TOKENS, "use_cache": False}
    torch.func.functional_call(model, tensors, (TOKENS,), inputs).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(tensors[name].grad, parameter.grad)
    model.eval().zero_grad()


def test_alignment_compares_with_the_bases_own_attention(model: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(
        base_folder(model.config.model_type.removeprefix("linearized_")), attn_implementation="eager"
    )
    targets = collect_align_targets(base, {"input_ids": TOKENS}, [0, 2])
    out = model(align=targets)
    layer = model.model.layers[0].self_attn
    assert out.layer_losses_L.shape == (2,)
    out.loss.backward()
    assert layer.get_submodule(layer.family.projections[0]).weight.grad.any()
    assert model.model.embed_tokens.weight.grad is None
    model.zero_grad()
