"""With all options of its layer, `mamba2` is the Mamba2 layer of transformers, as in Granite 4.

Shapes: B batch, T tokens, C hidden size, H heads, D head size and state size, N groups of heads.
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
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import QKV

GRANITE = {
    "type": "mamba2",
    "combine": "memory",
    "scope": "all",
    "gate": "constant",
    "gate_proj": True,
    "short_conv": 4,
    "conv_bias": True,
    "conv_activation": "silu",
    "skip": True,
    "output_gate": True,
    "output_gate_activation": "silu",
    "norm_after_gate": True,
}


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' layer without kernels of other packages."""
    for name, found in vars(modeling_granitemoehybrid).items():
        if hasattr(found, "__wrapped__") and name.startswith(("causal_conv1d", "mamba")):
            monkeypatch.setattr(modeling_granitemoehybrid, name, inspect.unwrap(found))


def stock_layer(groups: int) -> GraniteMoeHybridMambaLayer:
    """transformers' own layer with random weights, whose output is the concatenation of its heads."""
    config = GraniteMoeHybridConfig(
        hidden_size=C,
        num_hidden_layers=1,
        layer_types=["mamba"],
        mamba_n_heads=H,
        mamba_n_groups=groups,
        mamba_d_state=D,
        mamba_d_head=D,
        mamba_expand=1,
        mamba_conv_bias=True,
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(1)
    layer = GraniteMoeHybridMambaLayer(config, 0)
    with_random_weights(layer)
    return layer.eval()


def of_every_head(x: Tensor, groups: int) -> Tensor:
    """[H,D,*] of [N D,*]: what the heads of a group share, for each of them."""
    return x.unflatten(0, (groups, D)).repeat_interleave(H // groups, 0)


@torch.no_grad()
def granite_as_a_mixer(layer: GraniteMoeHybridMambaLayer, x_BTC: Tensor, **changes: Any) -> Tensor:
    """[B,T,H,D]: what our mixer reads with the layer's weights."""
    N = layer.n_groups
    torch.manual_seed(0)
    mixer: Any = build_mixer(resolve_spec(GRANITE | {"norm_all_heads": N == 1} | changes), DIMS)
    mixer.reset_parameters()
    z_EC, v_EC, k_EC, q_EC, dt_HC = layer.in_proj.weight.split([C, C, N * D, N * D, H])
    weights = of_every_head(q_EC, N), of_every_head(k_EC, N), v_EC.view(H, D, C)
    q, k, v = (torch.einsum("btc,hdc->bthd", x_BTC, weight) for weight in weights)
    of_v, of_k, of_q = torch.cat((layer.conv1d.weight[:, 0], layer.conv1d.bias[:, None]), 1).split([C, N * D, N * D])
    convolutions = mixer.short_conv.q, mixer.short_conv.k, mixer.short_conv.v
    for convolution, weight in zip(convolutions, (of_every_head(of_q, N), of_every_head(of_k, N), of_v.view(H, D, 5))):
        convolution.weight_NDK.copy_(weight[..., :4])
        if convolution.bias_ND is not None:
            convolution.bias_ND.copy_(weight[..., 4])
    mixer.gate_projection.gate_GXC.copy_(dt_HC[:, None])
    mixer.gate_bias_GF.copy_(layer.dt_bias[:, None])
    mixer.log_A_G1.copy_(layer.A_log[:, None])
    mixer.size_HV.copy_(layer.norm.weight.view(H, D))
    mixer.read_gate.weight_EC.copy_(z_EC)
    if mixer.spec.skip:
        mixer.skip_H1.copy_(layer.D[:, None])
    qkv = QKV(q, k, q, k, v, torch.arange(T).expand(B, T), x_BTC)
    read: Tensor = mixer.remember(qkv, metadata(), None).o_BTHV
    return read


@pytest.mark.parametrize("groups", [1, 2, H])
@torch.no_grad()
def test_mamba2_with_all_its_options_is_the_layer_of_granite(groups: int) -> None:
    layer, x_BTC = stock_layer(groups), layer_inputs()
    expected = layer(x_BTC)
    if groups == 2:  # each group of heads has a norm of its own, which no option expresses
        for of_all in (False, True):
            assert difference(granite_as_a_mixer(layer, x_BTC, norm_all_heads=of_all), expected) > 1e-2
        return
    # every token's step may round the state once
    assert difference(granite_as_a_mixer(layer, x_BTC), expected) < T * torch.finfo(torch.float32).eps
    for changed in (
        {"conv_bias": False},
        {"conv_activation": "none"},
        {"output_gate_activation": "sigmoid"},
        {"norm_after_gate": False},
        {"norm_all_heads": groups != 1},
        {"skip": False},
        {"gate": "head"},
        {"scope": "evicted", "window": 4},
    ):
        assert difference(granite_as_a_mixer(layer, x_BTC, **changed), expected) > 1e-2, changed


@pytest.mark.parametrize("piece", ["gate_GXC", "gate_bias_GF", "log_A_G1", "size_HV", "bias_ND", "weight_EC"])
@torch.no_grad()
def test_each_weight_of_the_stock_layer_is_needed(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x_BTC = stock_layer(H), layer_inputs()
    expected = layer(x_BTC)
    zero_before_reading(piece, monkeypatch)
    assert difference(granite_as_a_mixer(layer, x_BTC), expected) > 1e-2
