"""Linear layers run in kernels only where these give what the family's modules give."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from gated_kernels.common import registry
from tiny_models import build
from torch import Tensor, nn

from liger_convert.model.families import FAMILIES
from liger_convert.model.fused_modules import with_forwards
from liger_convert.model.fused_projections import JointProjections, fused_projections

NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj")
# GELU, squared ReLU or xIELU, no gate, or a bias
OTHER_FEED_FORWARDS = {"gemma", "gemma2", "gemma3_text", "starcoder2", "nemotron", "arcee", "apertus", "ernie4_5"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand-ins for the kernels. Returns, for each call, how many layers it computed; 0 for a SwiGLU."""
    calls: list[int] = []

    def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        calls.append(len(weights))
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))

    def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        calls.append(0)
        return (F.silu(F.linear(x.float(), gate.float())) * F.linear(x.float(), up.float())).to(x.dtype)

    for name, kernel in {"projections": projections, "swiglu": swiglu}.items():
        monkeypatch.setitem(registry._KERNELS, name, (kernel,))
        monkeypatch.setitem(registry._ASKED, name, kernel)
    return calls


def outputs(model: Any, x: Tensor) -> list[Tensor]:
    """What the feed-forward and the input projections of each layer return."""
    found = []
    for layer in model.model.layers:
        found += [layer.mlp(x)] if hasattr(layer, "mlp") else []
        attention = layer.self_attn
        found += [getattr(attention, name)(x) for name in NAMES if hasattr(attention, name)]
    return [y[0] if isinstance(y, tuple) else y for y in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layers_give_what_they_gave(family: str, dtype: torch.dtype, kernels: list[int]) -> None:
    model = build(family, type="gla").to(dtype)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn_like(parameter)
    x = 3 * torch.randn(2, 1, model.config.hidden_size).to(dtype)
    wanted = outputs(model, x)
    fused = fused_projections(model)
    kernels.clear()
    with with_forwards(fused):
        found = outputs(model, x)
    for y, z in zip(found, wanted):
        torch.testing.assert_close(y, z, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=float(z.abs().mean()) / 50)
    layers = len(model.model.layers)
    assert kernels.count(1 if FAMILIES[family].fused else 3) >= layers, "queries, keys and values are one kernel"
    if not FAMILIES[family].moe:
        assert kernels.count(0) == (0 if family in OTHER_FEED_FORWARDS else layers)
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_kernels_nothing_is_replaced() -> None:
    assert not fused_projections(build("llama", type="gla"))


@pytest.mark.parametrize("what", ["activation", "scale", "hook", "replaced"])
def test_a_feed_forward_that_does_something_else_stays(what: str, kernels: list[int]) -> None:
    model = build("llama", type="gla")
    assert model.model.layers[0].mlp in fused_projections(model)
    for layer in model.model.layers:
        if what == "activation":
            layer.mlp.act_fn = nn.GELU()
        elif what == "scale":
            layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: 1.1 * output)
            layer.mlp.gate_proj.register_forward_hook(lambda module, inputs, output: output)
        elif what == "hook":
            layer.mlp.up_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
        else:
            layer.mlp.forward = lambda x: x
    assert model.model.layers[0].mlp not in fused_projections(model)


@torch.no_grad()
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, kernels: list[int]) -> None:
    monkeypatch.setitem(registry._ASKED, "swiglu", lambda x, gate, up: 1.05 * F.silu(x @ gate.T) * (x @ up.T))
    model = build("llama", type="gla")
    assert not any(hasattr(module, "down_proj") for module in fused_projections(model))


@torch.no_grad()
def test_adapters_take_effect(kernels: list[int]) -> None:
    model = build("llama", type="gla")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj", "o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    x = torch.randn(2, 1, model.config.hidden_size)
    with adapted.disable_adapter():
        without = outputs(model, x)
    wanted = outputs(model, x)
    with with_forwards(fused_projections(model)):
        found = outputs(model, x)
    assert not torch.allclose(wanted[0], without[0])
    assert not torch.allclose(wanted[1], without[1])
    for y, z in zip(found, wanted):
        torch.testing.assert_close(y, z)


@torch.no_grad()
def test_weights_are_those_of_the_moment(kernels: list[int]) -> None:
    model = build("llama", type="gla")
    fused, x = fused_projections(model), torch.randn(2, 1, model.config.hidden_size)
    for parameter in model.parameters():
        parameter.mul_(2)
    with with_forwards(fused):
        found = outputs(model, x)
    for y, z in zip(found, outputs(model, x)):
        torch.testing.assert_close(y, z)


@torch.no_grad()
def test_layers_with_one_input_may_be_called_alone_again_or_with_another_one(kernels: list[int]) -> None:
    layers = [nn.Linear(8, n) for n in (4, 6, 5)]
    q, k, v = layers
    joint = JointProjections(layers)
    x, y = torch.randn(2, 2, 8)
    calls = [(q, x), (k, y), (k, x), (q, x), (q, y), (v, y), (v, x), (k, x), (k, x)]
    for layer, given in calls:
        torch.testing.assert_close(joint(layer, given), layer(given))
    kernels.clear()
    z = torch.randn(2, 8)
    for layer in layers:
        torch.testing.assert_close(joint(layer, z), layer(z))
    assert kernels == [3]
    assert joint.held is None, "nothing is kept alive"


@torch.no_grad()
def test_threads_with_other_inputs_do_not_mix_outputs(kernels: list[int]) -> None:
    layers = [nn.Linear(8, n) for n in (4, 6, 5)]
    joint, wrong = JointProjections(layers), []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(300):
            x = torch.randn(2, 8, generator=generator)
            for layer in layers:
                if not torch.allclose(joint(layer, x), layer(x)):
                    wrong.append(layer)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
