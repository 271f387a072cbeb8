"""Linear layers whose weights torchao stores in 8 bits: the kernels read them as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gated_kernels.common import registry
from gated_kernels.projections.arguments import ScaledWeight, Weight
from tiny_models import build
from torch import Tensor, nn

from liger_convert.benchmark import bench, limits
from liger_convert.model import quantization
from liger_convert.model.decoding import why_not_captured
from liger_convert.model.fused_modules import with_forwards
from liger_convert.model.fused_projections import are_read_as_stored, fused_projections, weight_of
from liger_convert.utils.errors import BadInput

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao, the extra `torchao`, is not installed"
)


class Int8Tensor(Tensor):
    """Stands in for torchao's class: it has the same attributes, and says that it is in half precision."""

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor

    def dequantize(self) -> Tensor:
        return (self.qdata * self.scale).as_subclass(Tensor)


Int8Tensor.__module__ = "torchao.quantization"


def stored(weight_NK: Tensor, bits: int = 8) -> nn.Parameter:
    """`weight_NK` as torchao stores it, without its own products."""
    scale_N1 = weight_NK.detach().float().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    numbers = (weight_NK.detach().float() / scale_N1).round().to(torch.int8)
    found: Any = (numbers * scale_N1).to(weight_NK.dtype).as_subclass(Int8Tensor)
    found.qdata, found.scale, found.zero_point = numbers, scale_N1, torch.zeros_like(scale_N1, dtype=torch.int8)
    parameter = nn.Parameter(found, requires_grad=False)
    vars(parameter).update(vars(found))
    return parameter


def with_8_bits(family: str = "llama") -> Any:
    model = build(family, type="gla")
    for name, module in model.named_modules():
        if f"{name}.weight" in quantization.linear_weights(model):
            module.weight = stored(module.weight)
    return model


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Weight]:
    """Stand-ins for the kernels. Returns all weights that they were called with."""
    given: list[Weight] = []

    def wide(weight: Weight) -> Tensor:
        given.append(weight)
        return weight.numbers_NK * weight.scale_N[:, None] if isinstance(weight, ScaledWeight) else weight

    def projections(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, wide(weight), bias) for weight, bias in zip(weights, biases))

    def swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
        return F.silu(F.linear(x, wide(gate))) * F.linear(x, wide(up))

    for name, kernel in {"projections": projections, "swiglu": swiglu}.items():
        monkeypatch.setitem(registry._KERNELS, name, (kernel,))
        monkeypatch.setitem(registry._ASKED, name, kernel)
    return given


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2"])
@torch.no_grad()
def test_kernels_get_numbers_and_scales(family: str, kernels: list[Weight]) -> None:
    model = with_8_bits(family)
    assert are_read_as_stored(model)
    fused, layer = fused_projections(model), model.model.layers[0]
    x = torch.randn(2, 1, model.config.hidden_size)
    wanted = layer.mlp(x)
    kernels.clear()
    with with_forwards(fused):
        found = layer.mlp(x)
    torch.testing.assert_close(found, wanted)
    assert len(kernels) == 3
    assert all(isinstance(weight, ScaledWeight) for weight in kernels)


@pytest.mark.parametrize("what", ["zero_point", "inputs", "columns", "class"])
def test_weights_that_are_more_than_numbers_and_scales_are_left_to_torchao(what: str, kernels: list[Weight]) -> None:
    model = with_8_bits()
    layer = model.model.layers[0].self_attn.o_proj
    assert layer in fused_projections(model)
    if what == "zero_point":
        layer.weight.zero_point[3] = 1
    elif what == "inputs":
        layer.weight.act_quant_kwargs = {"symmetric": True}
    elif what == "columns":
        layer.weight.scale = layer.weight.scale.expand(-1, 2)
    else:
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(type("Int4Tensor", (Tensor,), {})))
    assert layer not in fused_projections(model)
    assert are_read_as_stored(model) == (what == "zero_point")


def test_decoding_with_such_weights_is_captured_and_with_quantized_inputs_it_is_not() -> None:
    model = with_8_bits()
    model.is_quantized = True  # as transformers sets it
    assert why_not_captured(model) is None
    model.model.layers[0].mlp.up_proj.weight.act_quant_kwargs = {}
    assert "quantizes inputs" in str(why_not_captured(model))


def test_the_bench_counts_the_bytes_that_are_read() -> None:
    model = build("llama", type="gla")
    before = limits.work_of(model).weight_bytes
    weights = [dict(model.named_parameters())[name] for name in quantization.linear_weights(model)]
    after = limits.work_of(with_8_bits()).weight_bytes
    assert before - after == sum(3 * weight.numel() - 4 * len(weight) for weight in weights)


@torch.no_grad()
def test_the_bench_compares_with_the_numbers_that_are_stored() -> None:
    model = with_8_bits()
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, layer.in_features)
    with bench.in_float32(model):
        found = layer(x)
    torch.testing.assert_close(found, x @ weight_as_float(layer).T)
    assert isinstance(layer.weight, Int8Tensor)


def weight_as_float(layer: nn.Linear) -> Tensor:
    weight = weight_of(layer)
    assert isinstance(weight, ScaledWeight)
    return weight.numbers_NK * weight.scale_N[:, None]


@pytest.mark.parametrize("name", ["int8", "fp8"])
@needs_torchao
@torch.no_grad()
def test_torchao_stores_what_the_kernels_read(name: str, kernels: list[Weight]) -> None:
    model = build("llama", type="gla").bfloat16()
    before = {key: tensor.float() for key, tensor in model.state_dict().items()}
    quantization.store_in_8_bits(model, name)
    assert are_read_as_stored(model)
    chosen = quantization.linear_weights(build("llama", type="gla"))
    for key in chosen:
        layer = model.get_submodule(key.removesuffix(".weight"))
        weight = weight_of(layer)
        assert isinstance(weight, ScaledWeight), key
        wide = weight.numbers_NK.float() * weight.scale_N[:, None]
        torch.testing.assert_close(wide, before[key], atol=float(before[key].abs().max()) / 16, rtol=0)
        x = torch.randn(3, layer.in_features, dtype=torch.bfloat16)
        torch.testing.assert_close(layer(x).float(), x.float() @ wide.T, atol=2e-2, rtol=2e-2)
    left = [key for key, parameter in model.named_parameters() if type(parameter) is nn.Parameter]
    assert not set(left) & set(chosen)
    assert "lm_head.weight" in left or model.config.tie_word_embeddings


@needs_torchao
def test_transformers_loads_an_export_with_such_weights(tmp_path: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    model = build("llama", type="gla")
    model.save_pretrained(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    assert are_read_as_stored(loaded)
    assert why_not_captured(loaded) is None
    assert isinstance(weight_of(loaded.model.layers[0].mlp.up_proj), ScaledWeight)
    mixers = [parameter for name, parameter in loaded.named_parameters() if ".mixer." in name]
    assert mixers
    assert all(type(parameter) is nn.Parameter and parameter.dtype == torch.float32 for parameter in mixers)
    ids = torch.tensor([[5, 6, 7]])
    assert loaded.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_a_bench_asks_for_torchao_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = bench.Options([8], 1, 1, 1, torch.device("cpu"), torch.float32, quantize="int8")
    with pytest.raises(BadInput, match="needs the package torchao"):
        bench.bench_models("tiny", lambda: pytest.fail("a model was loaded"), None, options, lambda *_: None)


def test_without_torchao_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"--quantize int8: needs the package torchao.*liger-convert\[torchao\]"):
        quantization.store_in_8_bits(build("llama", type="gla"), "int8")
    with pytest.raises(BadInput, match="'int9' is unknown"):
        quantization.store_in_8_bits(build("llama", type="gla"), "int9")
