"""The short causal depthwise convolution of a memory's queries, keys and values.

y_t = b + sum_j w[K - 1 - j] x_{t-j},   j = 0 to K - 1, over the tokens of t's own document

Mamba (2312.00752), DeltaNet (2406.06484) and related models use K = 4. It starts as the identity, w = (0, …, 0, 1) and
b = 0. Only Mamba's models have the bias b, which is an option here. The papers' SiLU after it is one, too, because no
weights make the two together the identity. The window's queries, keys and values are not convolved.

Shapes: B batch, T new tokens, K taps, P = K - 1 tokens before them, S = P + T, N heads of any kind, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

if TYPE_CHECKING:
    from liger_convert.mixers.base import HeadDims
    from liger_convert.mixers.spec import Activation, MixerSpec

STATES = ("conv_q", "conv_k", "conv_v")


class RowPositions(NamedTuple):
    """Which tokens of the rows are real, and where each stands in its document.

    real_BT: False on padding, which the convolution skips; None without padding. position_BT: the number of tokens
    before a token in its document; None if each row is one document.
    """

    real_BT: Tensor | None
    position_BT: Tensor | None


def state_shapes(taps: int, dims: HeadDims) -> dict[str, tuple[int, ...]]:
    """Names and shapes, without the batch, of the float32 states of a layer's convolutions; none if `taps` is 0."""
    heads = (dims.heads, dims.kv_heads, dims.kv_heads)
    return {name: (taps - 1, count, dims.dim) for name, count in zip(STATES, heads)} if taps else {}


class ShortConvolution(nn.Module):
    """K taps per channel, weights [N,D,K]; the last tap is the token's own. `activation` is applied to the result."""

    def __init__(self, taps: int, heads: int, dim: int, activation: Activation = "none", bias: bool = False):
        super().__init__()
        self.activation = activation
        self.weight_NDK = nn.Parameter(torch.empty(heads, dim, taps))
        self.bias_ND = nn.Parameter(torch.empty(heads, dim)) if bias else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        own_K = torch.zeros_like(self.weight_NDK[0, 0])
        own_K[-1] = 1
        init.copy_(self.weight_NDK, own_K.expand_as(self.weight_NDK))
        if self.bias_ND is not None:
            init.zeros_(self.bias_ND)

    def forward(self, x_BTND: Tensor, before_BPND: Tensor | None, row: RowPositions) -> tuple[Tensor, Tensor]:
        """The convolved tokens in the dtype of x, and the float32 state: the last P real tokens.

        `before_BPND` is the state so far; None, at the start, stands for zeros.
        """
        past = self.weight_NDK.shape[-1] - 1
        (own_BTND, *earlier), after_BPND = recent_tokens(x_BTND, before_BPND, row, past)
        y_BTND = self.weight_NDK[..., past].float() * own_BTND.float()
        for back, x in enumerate(earlier, 1):
            y_BTND = y_BTND + self.weight_NDK[..., past - back].float() * x.float()
        if self.bias_ND is not None:
            y_BTND = y_BTND + self.bias_ND.float()
        if self.activation == "silu":
            y_BTND = F.silu(y_BTND)
        return y_BTND.to(x_BTND.dtype), after_BPND


class ShortConvolutions(nn.Module):
    """The convolutions of a layer's queries, keys and values."""

    def __init__(self, spec: MixerSpec, dims: HeadDims):
        super().__init__()
        taps, options = spec.conv_taps, (spec.conv_function, spec.conv_has_bias)
        self.q = ShortConvolution(taps, dims.heads, dims.dim, *options)
        self.k = ShortConvolution(taps, dims.kv_heads, dims.dim, *options)
        self.v = ShortConvolution(taps, dims.kv_heads, dims.dim, *options)

    def reset_parameters(self) -> None:
        for convolution in (self.q, self.k, self.v):
            convolution.reset_parameters()

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        read: RowPositions,
        written: RowPositions,
        states: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Returns the convolved q, k and v, and the new states.

        read: the row of the queries. written: the row of the keys and values, which may be those of evicted tokens.
        """
        q_BTHD, conv_q = self.q(q_BTHD, states.get("conv_q"), read)
        k_BTGD, conv_k = self.k(k_BTGD, states.get("conv_k"), written)
        v_BTGD, conv_v = self.v(v_BTGD, states.get("conv_v"), written)
        return q_BTHD, k_BTGD, v_BTGD, {"conv_q": conv_q, "conv_k": conv_k, "conv_v": conv_v}


def recent_tokens(
    x_BTND: Tensor, before_BPND: Tensor | None, row: RowPositions, past: int
) -> tuple[list[Tensor], Tensor]:
    """Each token and those 1 to `past` before it, and the float32 state: the last `past` tokens.

    The tokens are `past` + 1 tensors [B,T,N,D], with zeros where a token has no predecessor. `before_BPND` is the state
    so far; None at the start.
    """
    T = x_BTND.shape[1]
    if row.real_BT is not None:
        x_BTND = x_BTND.masked_fill(~row.real_BT[:, :, None, None], 0)
    if before_BPND is None:
        x_BSND = F.pad(x_BTND, (0, 0, 0, 0, past, 0))
    else:
        x_BSND = torch.cat((before_BPND.to(x_BTND.dtype), x_BTND), 1)
    # a single token directly follows the state; with several tokens, padding may lie in between
    index = None if row.real_BT is None or T == 1 else _predecessors(row.real_BT, past)
    found = [x_BTND]
    for back in range(1, past + 1):
        x = x_BSND[:, past - back :][:, :T] if index is None else _take(x_BSND, index[0][back])
        if row.position_BT is not None:
            x = x.masked_fill(row.position_BT[:, :, None, None] < back, 0)
        found.append(x)
    if index is not None:
        after_BPND = _take(x_BSND, index[1])
    elif row.real_BT is not None:
        after_BPND = torch.where(row.real_BT[:, :, None, None], x_BSND[:, 1:], x_BSND[:, :-1])
    else:
        after_BPND = x_BSND[:, T:]
    # a copy, because a view would keep the whole prompt alive
    return found, after_BPND.to(torch.float32, copy=True)


def _predecessors(real_BT: Tensor, past: int) -> tuple[list[Tensor], Tensor]:
    """Indices of real tokens into the state and the new tokens [B,S].

    Returns the indices of the tokens 0 to P before each new one, each [B,T], and of the last P tokens, [B,P]. No value
    is read on the host.
    """
    at_S = torch.arange(past + real_BT.shape[1], device=real_BT.device)
    last_BS = torch.where(F.pad(real_BT, (past, 0), value=True), at_S, 0).cummax(1).values
    back, kept = [at_S[past:].expand(real_BT.shape)], [last_BS[:, -1:]]
    for _ in range(past):
        back.append(last_BS.gather(1, back[-1] - 1))
    for _ in range(past - 1):
        kept.insert(0, last_BS.gather(1, kept[0] - 1))
    return back, torch.cat(kept, 1)


def _take(x_BSND: Tensor, index_BT: Tensor) -> Tensor:
    return x_BSND.gather(1, index_BT[:, :, None, None].expand(-1, -1, *x_BSND.shape[2:]))
