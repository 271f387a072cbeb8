"""What differs between the Hugging Face families: one row each. Everything else is read off the family's own modules.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from liger_convert.utils.errors import BadInput, did_you_mean


@dataclass(frozen=True)
class Family:
    """How one family's attention makes its queries, keys and values.

    `projections`: names of its linear maps, the last one being the output map. One fused input map means q, k, v stand
    behind each other in its output.
    `qk_norm`: whether queries and keys are normalised per head, over the flat projection (before the split into
    heads), or not at all.
    """

    model_type: str
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    qk_norm: Literal["none", "head", "flat"] = "none"
    moe: bool = False
    rotary: Literal["halves", "in_attention"] = "halves"
    passes_kwargs: bool = True
    output_dropout: bool = False

    @property
    def fused(self) -> bool:
        return len(self.projections) == 2


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3", qk_norm="head"),
        Family("phi3", projections=("qkv_proj", "o_proj")),
        Family("gemma"),
        Family("olmo2", qk_norm="flat"),
        Family("smollm3"),
        Family("granite"),
        Family("mixtral", moe=True),
        Family("qwen3_moe", qk_norm="head", moe=True),
        Family("olmoe", qk_norm="flat", moe=True),
    )
}

PREFIX = "linearized_"


def family_of(config: Any) -> Family:
    """The row of a base's or a linearized model's Hugging Face config. Raises BadInput with the list of families."""
    model_type = str(getattr(config, "model_type", None))
    name = model_type.removeprefix(PREFIX)
    if name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES)
        known = ", ".join(FAMILIES)
        raise BadInput(f"config.json: model_type {model_type!r} is not supported{hint}; supported: {known}")
    return FAMILIES[name]


def head_dim(config: Any) -> int:
    """The size of one attention head of `config`."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def project_qkv(attention: Any, family: Family, dim: int, kv_heads: int, x_BTC: Tensor) -> tuple[Tensor, ...]:
    """Queries [B,T,H,D] and keys, values [B,T,G,D] before rotary, by the family's own modules (adapters included).

    `attention.clip` (OLMoE's clip_qkv) bounds them, None does not.
    """
    if family.fused:
        qkv = getattr(attention, family.projections[0])(x_BTC)
        kv = kv_heads * dim
        q, k, v = qkv.split([qkv.shape[-1] - 2 * kv, kv, kv], -1)
    else:
        q, k, v = (getattr(attention, name)(x_BTC) for name in family.projections[:3])
    if family.qk_norm == "flat":
        q, k = attention.q_norm(q), attention.k_norm(k)
    if attention.clip is not None:
        q, k, v = (t.clamp(-attention.clip, attention.clip) for t in (q, k, v))
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
    if family.qk_norm == "head":
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q, k, v
