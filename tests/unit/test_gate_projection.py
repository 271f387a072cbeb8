"""`gate_proj` adds W x to every gate, and with all options of its layer, `gated-deltanet` is the layer of Qwen3-Next.

Shapes: B batch, T tokens, C hidden size, H heads, D head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from stock_layers import (
    DIMS,
    B,
    C,
    D,
    H,
    T,
    difference,
    layer_inputs,
    metadata,
    with_random_weights,
    zero_before_reading,
)
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from liger_convert.mixers import MIXERS, build_mixer, make_spec, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, Mixer
from liger_convert.mixers.spec import GateProjSpec
from liger_convert.utils.errors import BadInput

QWEN = {
    "type": "gated-deltanet",
    "combine": "memory",
    "scope": "all",
    "beta": "constant",
    "short_conv": 4,
    "conv_activation": "silu",
    "gate_proj": True,
    "decay_scale": True,
    "output_norm": "rms",
    "output_gate": True,
    "output_gate_activation": "silu",
}
PROJECTED = [name for name, mixer in MIXERS.items() if issubclass(mixer.Spec, GateProjSpec) and name != "hgrn2"]


def mixer_of(spec: dict[str, Any], dims: HeadDims = DIMS) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec(spec), dims)
    mixer.reset_parameters()
    return mixer


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' layer without fla, which it would use if that is installed, even on a CPU, and without the epsilon
    of 1e-6 that it adds to squared lengths: our vectors have length 1 however short they were."""
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(modeling_qwen3_next, name, inspect.unwrap(getattr(modeling_qwen3_next, name)))
    monkeypatch.setattr(modeling_qwen3_next, "l2norm", lambda x, dim, eps: nn.functional.normalize(x, dim=dim))


def stock_layer() -> Qwen3NextGatedDeltaNet:
    """transformers' own layer with random weights, whose output is the concatenation of its heads."""
    config = Qwen3NextConfig(
        hidden_size=C,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_value_heads=H,
        linear_num_key_heads=H,
        linear_key_head_dim=D,
        linear_value_head_dim=D,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6 / D,  # its reads are 1 / sqrt(D) of ours
    )
    torch.manual_seed(1)
    layer = Qwen3NextGatedDeltaNet(config, 0)
    with_random_weights(layer)
    return layer


@torch.no_grad()
def qwen_as_a_mixer(layer: Qwen3NextGatedDeltaNet, x_BTC: Tensor, **changes: Any) -> Tensor:
    """[B,T,H,D]: what our mixer reads with the layer's weights."""
    mixer: Any = mixer_of(QWEN | changes).to(x_BTC.dtype)
    q_DC, k_DC, v_DC, z_DC = layer.in_proj_qkvz.weight.view(H, 4, D, C).unbind(1)
    b_HC, a_HC = layer.in_proj_ba.weight.view(H, 2, C).unbind(1)
    q, k, v = (torch.einsum("btc,hdc->bthd", x_BTC, weight) for weight in (q_DC, k_DC, v_DC))
    convolutions = layer.conv1d.weight.view(3, H, D, 4)
    for convolution, weight in zip((mixer.short_conv.q, mixer.short_conv.k, mixer.short_conv.v), convolutions):
        convolution.weight_NDK.copy_(weight)
    mixer.beta_bias_GX.zero_()
    mixer.gate_projection.beta_GXC.copy_(b_HC[:, None])
    # the decay's logits also have the mean of the key's channels
    mixer.gate_projection.gate_GXC.copy_((a_HC - k_DC.mean(1))[:, None])
    mixer.gate_bias_G1.copy_(layer.dt_bias[:, None])
    mixer.decay_scale.log_scale_G1.copy_(layer.A_log[:, None])
    mixer.read_norm.size_HV.copy_(layer.norm.weight.expand(H, D))
    mixer.read_gate.weight_EC.copy_(z_DC.flatten(0, 1))
    qkv = QKV(q, k, q, k, v, torch.arange(T).expand(B, T), x_BTC)
    read: Tensor = mixer.remember(qkv, metadata(), None).o_BTHV
    return read


@torch.no_grad()
def test_gated_deltanet_with_all_its_options_is_the_layer_of_qwen3_next() -> None:
    layer, x_BTC = stock_layer(), layer_inputs()
    expected = layer(x_BTC)
    # every token's step may round the state once
    assert difference(qwen_as_a_mixer(layer, x_BTC), expected) < T * torch.finfo(torch.float32).eps
    for left_out in (
        {"conv_activation": "none"},
        {"output_gate_activation": "sigmoid"},
        {"beta": "pooled"},
        {"scope": "evicted", "window": 4},
    ):
        assert difference(qwen_as_a_mixer(layer, x_BTC, **left_out), expected) > 1e-2, left_out


@pytest.mark.parametrize("piece", ["log_scale_G1", "gate_GXC", "beta_GXC"])
@torch.no_grad()
def test_each_weight_of_the_stock_layer_is_needed(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x_BTC = stock_layer(), layer_inputs()
    expected = layer(x_BTC)
    zero_before_reading(piece, monkeypatch)
    assert difference(qwen_as_a_mixer(layer, x_BTC), expected) > 1e-2


@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize("rope", [False, True])
@torch.no_grad()
def test_a_projection_of_the_input_is_added_to_every_gate(name: str, rope: bool) -> None:
    dims = HeadDims(hidden=12, heads=4, kv_heads=2, dim=8)
    mixer: Any = mixer_of({"type": name, "gate_proj": True, "rope": rope}, dims)
    x = torch.randn(1, 5, 12)
    q, k, v, k_rot = (torch.randn(1, 5, heads, 8) for heads in (4, 2, 2, 2))
    qkv = QKV(q, k, q, k_rot, v, torch.arange(5)[None], x)
    inputs = mixer.deferred_inputs(qkv)
    sizes = mixer.deferred_input_sizes(make_spec(resolve_spec({"type": name, "gate_proj": True, "rope": rope})), dims)
    assert tuple(i.shape[-1] for i in inputs) == sizes
    assert torch.equal(inputs[1], k)
    assert torch.equal(inputs[-1], k_rot if rope else k)
    start = mixer.write(inputs, v)
    for gate, size in mixer.gate_sizes(mixer.spec, dims).items():
        weight_GXC = mixer.gate_projection.get_parameter(f"{gate}_GXC")
        assert weight_GXC.shape == (2, size, 12)
        weight_GXC.normal_()
        moved = mixer.deferred_inputs(qkv)
        exact = torch.einsum("btc,gxc->btgx", x.double(), weight_GXC.double())
        # a sum of 12 products, each of which may round once
        rounding = 12 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (mixer.gate_projection.of_gate(moved[0], gate) - exact).abs().max() <= rounding
        assert any(not torch.equal(*pair) for pair in zip(mixer.write(moved, v), start)), f"{gate} is not read"
        weight_GXC.zero_()
    assert all(torch.equal(*pair) for pair in zip(mixer.write(mixer.deferred_inputs(qkv), v), start))


def test_gates_that_are_projected_keep_the_dtype_of_the_keys_in_the_ring() -> None:
    mixer, x = mixer_of({"type": "kda", "gate_proj": True}).bfloat16(), torch.randn(B, T, C).bfloat16()
    q = torch.randn(B, T, H, D).bfloat16()
    inputs = mixer.deferred_inputs(QKV(q, q, q, q, q, torch.arange(T).expand(B, T), x))
    assert {each.dtype for each in inputs} == {torch.bfloat16}
    assert isinstance(mixer.gate_projection, nn.Module)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"type": "gla", "gate": "none", "gate_proj": True}, "gate_proj"),
        ({"type": "hgrn2", "gate_proj": True}, "gate_proj"),
        ({"type": "lightning", "gate_proj": True}, "gate_proj"),
        ({"type": "kda", "conv_activation": "silu"}, "conv_activation"),
        ({"type": "kda", "output_gate_activation": "silu"}, "output_gate_activation"),
        ({"type": "kda", "output_gate": True, "output_gate_activation": "gelu"}, "output_gate_activation"),
        ({"type": "deltanet", "decay_scale": True}, "decay_scale"),
    ],
    ids=str,
)
def test_options_without_what_they_act_on_are_refused(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=rf"^mixer\.{field}: "):
        resolve_spec(spec)


def test_no_fused_step_leaves_out_a_projected_gate() -> None:
    assert mixer_of({"type": "gla"}).step_config() is not None
    assert mixer_of({"type": "gla", "gate_proj": True}).step_config() is None
