"""Feature maps phi, which turn queries and keys into the features of the memory's state.

A map is made for a number of heads and a head size. If its features are not negative, the weights phi(q) phi(k) can be
normalized.
Shapes: N heads (query or key-value), H query heads, G key-value heads, R = H / G, D head size, E size of a code,
F feature size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
import torch.nn.functional as nnf
from gated_kernels.codebook.chunk import chunk_codebook, per_head, unit_projection
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.precision import multiplies_in_bf16

Result = TypeVar("Result")
FeatureMapName = Literal["codebook", "hedgehog", "softmax2", "softmax", "exp", "elu1", "relu", "identity"]

POSITIVE: tuple[FeatureMapName, ...] = ("codebook", "hedgehog", "softmax2", "softmax", "exp", "elu1", "relu")


def feature_size(name: FeatureMapName, dim: int, codes: int = 0) -> int:
    """F for a head of size `dim`: `codes` for a codebook, 2 D for two-sided maps, else D."""
    if name == "codebook":
        return codes
    return 2 * dim if name in ("hedgehog", "softmax2", "exp") else dim


def two_sided_softmax(x: Tensor) -> Tensor:
    """[softmax(x), softmax(-x)]: positive and bounded, with peaks on both sides of zero (Hedgehog, 2402.04347)."""
    return torch.cat((x.softmax(-1), (-x).softmax(-1)), -1)


class FeatureMap(nn.Module):
    """phi: [B,T,N,D] -> [B,T,N,F] in float32. `hedgehog` first multiplies each head by a learned matrix."""

    def __init__(self, name: FeatureMapName, heads: int, dim: int):
        super().__init__()
        self.name = name
        if name == "hedgehog":
            self.turn_NDD = nn.Parameter(torch.empty(heads, dim, dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.name == "hedgehog":
            heads, dim, _ = self.turn_NDD.shape
            eye = torch.eye(dim, dtype=self.turn_NDD.dtype, device=self.turn_NDD.device)
            init.copy_(self.turn_NDD, eye.expand(heads, dim, dim))

    def forward(self, x_BTND: Tensor) -> Tensor:
        x = x_BTND.float()
        match self.name:
            case "hedgehog":
                return two_sided_softmax(per_head(x, self.turn_NDD.float()))
            case "softmax2":
                return two_sided_softmax(x)
            case "softmax":
                return x.softmax(-1)
            case "exp":
                # the clamp bounds one weight at e^30, so that sums over any length stay far inside float32
                return torch.cat((x.clamp(-15, 15).exp(), (-x).clamp(-15, 15).exp()), -1)
            case "elu1":
                return nnf.elu(x) + 1
            case "relu":
                return x.relu()
            case _:
                return x


class Codebook(nn.Module):
    """phi(x) = softmax(s C u), where u is P x + b scaled to length 1: how close x is to each of F codes. They sum to 1.

    Queries and keys of a key-value head share its codes C. Each head has its own P, b and inverse temperature s. A
    token is written under the codes closest to its key, and queries close to the same codes read it. So the memory can
    tell about F groups of tokens apart, instead of D. This only works with good initial values of P, b and C, which
    `training.calibrate` computes from the base.
    """

    def __init__(self, codes: int, heads: int, kv_heads: int, dim: int):
        super().__init__()
        size = code_size(dim)
        self.q_turn_HDE = nn.Parameter(torch.empty(heads, dim, size))
        self.q_shift_HE = nn.Parameter(torch.empty(heads, size))
        self.q_log_tau_H = nn.Parameter(torch.empty(heads))
        self.k_turn_GDE = nn.Parameter(torch.empty(kv_heads, dim, size))
        self.k_shift_GE = nn.Parameter(torch.empty(kv_heads, size))
        self.k_log_tau_G = nn.Parameter(torch.empty(kv_heads))
        self.codes_GFE = nn.Parameter(torch.empty(kv_heads, codes, size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for proj, bias, log_inv_temperature in (
            (self.q_turn_HDE, self.q_shift_HE, self.q_log_tau_H),
            (self.k_turn_GDE, self.k_shift_GE, self.k_log_tau_G),
        ):
            init.copy_(proj, torch.eye(*proj.shape[1:], dtype=proj.dtype, device=proj.device).expand_as(proj))
            init.zeros_(bias)
            init.constant_(log_inv_temperature, 3.0)
        init.normal_(self.codes_GFE, std=self.codes_GFE.shape[-1] ** -0.5)

    def forward(self, use: Callable[[Codebook], Result]) -> Result:
        """Returns `use(self)`.

        All access to the parameters must go through this call, because offloaded weights are only present while the
        module that owns them is being called.
        """
        return use(self)

    def projected_queries(self, q_BTHD: Tensor) -> Tensor:
        """u of the queries, [B,T,H,E]."""
        return unit_projection(q_BTHD, self.q_turn_HDE, self.q_shift_HE)

    def projected_keys(self, k_BTGD: Tensor) -> Tensor:
        """u of the keys, [B,T,G,E]."""
        return unit_projection(k_BTGD, self.k_turn_GDE, self.k_shift_GE)

    def queries(self, q_BTHD: Tensor) -> Tensor:
        """phi(q) [B,T,H,F], in bf16 if the recurrence multiplies in bf16, else in float32."""
        q_BTHD = q_BTHD if multiplies_in_bf16(q_BTHD) else q_BTHD.float()
        return chunk_codebook(q_BTHD, self.q_turn_HDE, self.q_shift_HE, self.q_log_tau_H, self.codes_GFE)

    def keys(self, k_BTGD: Tensor) -> Tensor:
        """phi(k) [B,T,G,F], in the same dtype as phi(q)."""
        k_BTGD = k_BTGD if multiplies_in_bf16(k_BTGD) else k_BTGD.float()
        return chunk_codebook(k_BTGD, self.k_turn_GDE, self.k_shift_GE, self.k_log_tau_G, self.codes_GFE)

    def pooled_keys(self, k_BTGD: Tensor) -> Tensor:
        """A weighted mean of the key's channels for each code, [B,T,G,F] in float32.

        The weight of a channel is the square of its entry in P c, the code's direction, scaled to length 1.
        """
        with torch.autocast(k_BTGD.device.type, enabled=False):
            directions_GDF = self.k_turn_GDE.float() @ self.codes_GFE.float().mT
            return per_head(k_BTGD.float(), nnf.normalize(directions_GDF, dim=1).square())


def code_size(dim: int) -> int:
    """E, half the head size: that is enough to match queries and keys beyond the window."""
    return max(1, dim // 2)
