"""RWKV6: a data-dependent decay per channel, and a bonus for the current token (2404.05892).

S_t = diag(a_t) S_{t-1} + k_t^T v_t,   a_t = exp(-exp(pool(k_t) + b)),   o_t = norm(q_t (S_{t-1} + diag(u) k_t^T v_t))

With `scope: all`, the read is the paper's. With `scope: evicted`, the memory ends before the window, which already
covers the current token. There, `bonus: true` adds q_t diag(u) k_t^T v_t to the read, and u starts at 0. The decay is
computed from pooled keys, as in Liger (2503.01496, table 1); gate_projection.py adds a projection. `token_shift` is
described in projection_pieces.py, and the output gate in read_pieces.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.registry import register_mixer

FASTEST = 5.0  # largest logit, which keeps e^-148 of the state: exp of unclamped pretrained keys would overflow


@dataclass(frozen=True)
class RWKV6Spec(GatedSpec):
    """Options of the read, the token shift and the decay.

    bonus: whether the read also includes the query's own token, with a learned weight u per key channel that starts at
        0. With `scope: all`, this is the only way to read that token, so it is always on and u starts at 1.
    token_shift: whether queries, keys and values, including the window's, are mixed with those of the previous token.
        The learned share starts at 0.
    gate_bias: where the learned bias b of the decay starts. A larger value forgets faster; with -7 the memory lasts
        about 1,100 tokens.
    """

    bonus: bool = False
    token_shift: bool = False
    gate: Literal["pooled", "head", "learned", "constant"] = "pooled"
    gate_bias: float = -7.0

    @property
    def shift(self) -> Literal["none", "key_value", "token"]:
        return "token" if self.token_shift else "none"


@register_mixer("rwkv6")
class RWKV6(GatedMixer):
    summary = "linear attention with a token-dependent decay per channel, and optionally a bonus for the current token"
    gate_rule = "exp(-exp(pool(k) + bias))"
    left_out = (
        "nothing; off by default: `gate_proj` (of full rank instead of low rank), `token_shift` (after the "
        "projections instead of before them), `output_gate` with `output_gate_activation: silu`, and, with `scope: "
        "evicted`, `bonus`"
    )
    Spec = RWKV6Spec
    spec: RWKV6Spec

    def __init__(self, spec: RWKV6Spec, dims: HeadDims):
        super().__init__(spec, dims)
        self.reads_own = spec.bonus or spec.scope == "all"
        if self.reads_own:
            self.bonus_GF = nn.Parameter(torch.empty(dims.kv_heads, self.features))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.reads_own:
            init.constant_(self.bonus_GF, 1.0 if self.spec.scope == "all" else 0.0)

    def decay(self, logits: Tensor) -> Tensor:
        return -logits.clamp(max=FASTEST).exp()

    def attend(
        self, q_BTHF: Tensor, entries: tuple[Tensor, ...], **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        return super().attend(q_BTHF, entries, **options | {"exclusive": True})

    def add_current(
        self,
        qkv: QKV,
        q_BTHF: Tensor,
        entries: tuple[Tensor, ...],
        o_BTHV: Tensor,
        normalizer_BTH: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.reads_own:
            return o_BTHV, normalizer_BTH
        k_BTGF, v_BTGV, *_ = entries
        if self.spec.scope == "evicted":  # `entries` are those of the tokens that leave the window
            k_BTGF, v_BTGV = self.key_features(self.deferred_inputs(qkv)), qkv.v_BSGD[:, -q_BTHF.shape[1] :]
        q_BTGRF, uk_BTGF = q_BTHF.unflatten(2, (self.dims.kv_heads, -1)), k_BTGF * self.bonus_GF.float()
        weight_BTGR1 = (q_BTGRF * uk_BTGF[:, :, :, None]).sum(-1, keepdim=True)
        o_BTHV = o_BTHV + (weight_BTGR1 * v_BTGV[:, :, :, None].float()).flatten(2, 3)
        return o_BTHV, None if normalizer_BTH is None else normalizer_BTH + weight_BTGR1.flatten(2)
