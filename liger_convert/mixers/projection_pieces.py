"""Optional changes to queries, keys and values before rotary, as in several papers, for both window and memory.

k'_t = k_t + alpha_t (k_{t-1} - k_t), v'_t likewise,   alpha_t = tanh(w x_t)               (kv_shift)
q'_t = size * q_t / rms(q_t), k'_t likewise                                                (qk_norm)
q'_t = q_t + m_t * (q_{t-1} - q_t), k'_t and v'_t likewise,   m_t = c + tanh(z_t A) B,
z_t = x_t + mu * (x_{t-1} - x_t)                                                           (token_shift)

x is the layer's input. Before the first token of a document, everything is zero.

`kv_shift` and `qk_norm` are from the Forgetting Transformer (2503.02130), with one alpha per head. The paper computes
alpha with a sigmoid, which is never 0; here it is a tanh, which is 0 at w = 0, where it starts. `token_shift` is from
RWKV6 (2404.05892), with one share m per channel and matrices A and B of low rank. It starts at c = B = 0. The paper
shifts x, before the projections. A norm changes attention even before training, whatever its scale.

Shapes: B batch, T tokens, C hidden size, H query heads, G key-value heads, D head size, L rank, Y = (H + 2 G) D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.read_pieces import normed
from liger_convert.mixers.short_convolution import RowPositions, recent_tokens

if TYPE_CHECKING:
    from liger_convert.mixers.base import HeadDims

Shift = Literal["none", "key_value", "token"]
RANK = 32  # as published
STATES = ("shift_x", "shift_q", "shift_k", "shift_v")


def shift_shapes(shift: Shift, dims: HeadDims) -> dict[str, tuple[int, ...]]:
    """Names and shapes, without the batch, of a shift's float32 states, which hold the last token."""
    of_kv: dict[str, tuple[int, ...]] = {
        "shift_k": (1, dims.kv_heads, dims.dim),
        "shift_v": (1, dims.kv_heads, dims.dim),
    }
    match shift:
        case "key_value":
            return of_kv
        case "token":
            return {"shift_x": (1, 1, dims.hidden), "shift_q": (1, dims.heads, dims.dim), **of_kv}
    return {}


def make_shift(shift: Shift, dims: HeadDims) -> KeyValueShift | TokenShift | None:
    """The module of a shift; None for none."""
    match shift:
        case "key_value":
            return KeyValueShift(dims)
        case "token":
            return TokenShift(dims)
    return None


class QueryKeyNorm(nn.Module):
    """An RMS norm of every query and key, with a learned scale per channel."""

    def __init__(self, dims: HeadDims):
        super().__init__()
        self.q_size_HD = nn.Parameter(torch.empty(dims.heads, dims.dim))
        self.k_size_GD = nn.Parameter(torch.empty(dims.kv_heads, dims.dim))

    def reset_parameters(self) -> None:
        init.ones_(self.q_size_HD)
        init.ones_(self.k_size_GD)

    def forward(self, q_BTHD: Tensor, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized q and k in their own dtypes, computed in float32."""
        q, k = normed(q_BTHD.float(), self.q_size_HD), normed(k_BTGD.float(), self.k_size_GD)
        return q.to(q_BTHD.dtype), k.to(k_BTGD.dtype)


class KeyValueShift(nn.Module):
    """Mixes keys and values with those of the previous token, by one share per head."""

    def __init__(self, dims: HeadDims):
        super().__init__()
        self.key_GC = nn.Parameter(torch.empty(dims.kv_heads, dims.hidden))
        self.value_GC = nn.Parameter(torch.empty(dims.kv_heads, dims.hidden))

    def reset_parameters(self) -> None:
        init.zeros_(self.key_GC)
        init.zeros_(self.value_GC)

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        x_BTC: Tensor,
        row: RowPositions,
        states: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Returns q unchanged, k and v shifted, and the new states."""
        of_key, of_value = (_project(x_BTC, weight).tanh()[..., None] for weight in (self.key_GC, self.value_GC))
        k_BTGD, after_k = _shifted(k_BTGD, of_key, row, states.get("shift_k"))
        v_BTGD, after_v = _shifted(v_BTGD, of_value, row, states.get("shift_v"))
        return q_BTHD, k_BTGD, v_BTGD, {"shift_k": after_k, "shift_v": after_v}


class TokenShift(nn.Module):
    """Mixes queries, keys and values with those of the previous token, by one share per channel."""

    def __init__(self, dims: HeadDims):
        super().__init__()
        self.sizes = [heads * dims.dim for heads in (dims.heads, dims.kv_heads, dims.kv_heads)]
        self.mu_C = nn.Parameter(torch.empty(dims.hidden))
        self.constant_Y = nn.Parameter(torch.empty(sum(self.sizes)))
        self.down_LC = nn.Parameter(torch.empty(RANK, dims.hidden))
        self.up_YL = nn.Parameter(torch.empty(sum(self.sizes), RANK))

    def reset_parameters(self) -> None:
        for parameter in (self.mu_C, self.constant_Y, self.up_YL):
            init.zeros_(parameter)
        init.normal_(self.down_LC, std=self.down_LC.shape[1] ** -0.5)

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        x_BTC: Tensor,
        row: RowPositions,
        states: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Returns q, k and v shifted, and the new states."""
        z_BT1C, after_x = _shifted(x_BTC[:, :, None], self.mu_C.float(), row, states.get("shift_x"))
        low_BTL = _project(z_BT1C[:, :, 0], self.down_LC).tanh()
        m_BTY = self.constant_Y.float() + _project(low_BTL, self.up_YL)
        after, shifted = {"shift_x": after_x}, []
        of_tokens = {"shift_q": q_BTHD, "shift_k": k_BTGD, "shift_v": v_BTGD}
        for (name, of_token), m in zip(of_tokens.items(), m_BTY.split(self.sizes, -1), strict=True):
            moved, after[name] = _shifted(of_token, m.view(of_token.shape), row, states.get(name))
            shifted.append(moved)
        q, k, v = shifted
        return q, k, v, after


def _project(x_BTC: Tensor, weight_YC: Tensor) -> Tensor:
    """A linear map in float32, so that a small result is not lost when it is added to 1."""
    with torch.autocast(x_BTC.device.type, enabled=False):
        return F.linear(x_BTC.float(), weight_YC.float())


def _shifted(x_BTND: Tensor, share: Tensor, row: RowPositions, before_B1ND: Tensor | None) -> tuple[Tensor, Tensor]:
    """x interpolated by `share` towards the previous token, in the dtype of x, and the new state."""
    (own, earlier), after_B1ND = recent_tokens(x_BTND, before_B1ND, row, 1)
    return (own.float() + share * (earlier.float() - own.float())).to(x_BTND.dtype), after_B1ND
