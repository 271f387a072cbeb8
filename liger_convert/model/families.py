"""The differences between Hugging Face families, one entry each. All else is read from the family's own modules.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from liger_convert.utils.errors import BadInput


@dataclass(frozen=True)
class Family:
    """The properties of one family's attention and of the decoder layer that calls it.

    `projections`: names of its linear layers, the output projection last. With two names the input projection is fused:
    its output is q, k and v concatenated.
    `qk_norm`: queries and keys are normalized per head by `q_norm` and `k_norm` (`head`) or by `q_layernorm` and
    `k_layernorm` (`each_head`), over the flat projection before the split into heads (`flat`), or not at all (`none`).
    Modules that the config does not enable are left out.
    `rotary`: which channels the module's `apply_rotary_pos_emb` pairs. `halves`: channel c with c + C / 2 of C rotated
    channels. `pairs`: channel 2c with 2c + 1. `split_halves`: as `halves`, but attention itself splits off the first C
    channels and rotates only those.
    `rotary_in`: which layers have rotary: all but those with `use_rope: false` (`all`), those with a sliding window
    (`sliding`), or these if the config has a sliding window, and all otherwise (`sliding_if_any`).
    `softcap`: attention softcaps its logits with `attn_logit_softcapping`.
    `position_scale`: queries are scaled with their position, by the config's `llama_4_scaling_beta`.
    `output_dropout`: attention applies dropout to its output in training, with rate `residual_dropout`.
    `passes_kwargs`: the decoder layer passes extra keyword arguments on to attention.
    `divides_heads`: the size of a head is `hidden_size` divided by the number of heads, whatever `head_dim` says.
    """

    model_type: str
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    qk_norm: Literal["none", "head", "each_head", "flat"] = "none"
    moe: bool = False
    rotary: Literal["halves", "pairs", "split_halves"] = "halves"
    rotary_in: Literal["all", "sliding", "sliding_if_any"] = "all"
    softcap: bool = False
    position_scale: bool = False
    output_dropout: bool = False
    passes_kwargs: bool = True
    divides_heads: bool = False

    @property
    def fused(self) -> bool:
        return len(self.projections) == 2


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("ministral"),
        Family("ministral3", position_scale=True),
        Family("qwen2"),
        Family("qwen3", qk_norm="head"),
        Family("phi3", projections=("qkv_proj", "o_proj")),
        Family("gemma"),
        Family("gemma2", softcap=True),
        Family("gemma3_text", qk_norm="head"),
        Family("glm", rotary="pairs"),
        Family("glm4", rotary="pairs"),
        Family("cohere", qk_norm="head", rotary="pairs"),
        Family("cohere2", rotary="pairs", rotary_in="sliding"),
        Family("exaone4", qk_norm="head", rotary_in="sliding_if_any"),
        Family("ernie4_5", rotary="pairs"),
        Family("helium", rotary="pairs"),
        Family("apertus", qk_norm="head"),
        Family("arcee"),
        Family("seed_oss", output_dropout=True),
        Family("nemotron", passes_kwargs=False),
        Family("olmo"),
        Family("olmo2", qk_norm="flat"),
        Family("olmo3", qk_norm="flat"),
        Family("smollm3"),
        Family("granite"),
        Family("starcoder2", output_dropout=True),
        Family("stablelm", qk_norm="each_head", rotary="split_halves", passes_kwargs=False, divides_heads=True),
        Family("mixtral", moe=True),
        Family("qwen3_moe", qk_norm="head", moe=True),
        Family("olmoe", qk_norm="flat", moe=True),
    )
}

PREFIX = "linearized_"  # of the model_type of a linearized model; the rest is that of its base


def is_linearized(config: Any) -> bool:
    """Whether a Hugging Face config is that of a linearized model."""
    return config.model_type.startswith(PREFIX)


def base_model_type(config: Any) -> str:
    """The model_type of the base that a linearized model was made from; of any other config, its own."""
    return config.model_type.removeprefix(PREFIX)


def family_of(config: Any) -> Family:
    """The family of a base's or a linearized model's Hugging Face config.

    Raises BadInput, listing the supported families, when it is not supported.
    """
    model_type = str(getattr(config, "model_type", None))
    name = model_type.removeprefix(PREFIX)
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadInput(f"config.json: model_type {model_type!r} is not supported; supported: {known}")
    return FAMILIES[name]


def head_dim(config: Any) -> int:
    """The size of one attention head of `config`."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def own_windows(config: Any) -> list[int | None]:
    """The base's own sliding window in each layer of `config`, None where a layer sees all tokens."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]


def sliding_layers(windows: Sequence[int | None]) -> list[int]:
    """The layers with a window; empty if every layer has one, because then these are what is to be linearized."""
    return [] if None not in windows else [i for i, window in enumerate(windows) if window is not None]


def rotates(family: Family, attention: Any, window: int | None) -> bool:
    """Whether a layer of the base has rotary. attention: its own module. window: its own sliding window, if any."""
    if family.rotary_in == "sliding_if_any":
        return window is not None or attention.sliding_window is None
    return window is not None if family.rotary_in == "sliding" else getattr(attention, "use_rope", True)


def project_qkv(attention: Any, family: Family, dim: int, kv_heads: int, x_BTC: Tensor) -> tuple[Tensor, ...]:
    """Queries [B,T,H,D], keys and values [B,T,G,D] before rotary, from the family's own modules (adapters included).

    x_BTC: the layer's inputs. dim: D. kv_heads: G. q, k and v are clamped to +-`attention.clip` (OLMoE's clip_qkv),
    unless that is None.
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
    if family.qk_norm == "head" and hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    elif family.qk_norm == "each_head" and hasattr(attention, "q_layernorm"):
        q, k = attention.q_layernorm(q.transpose(1, 2)), attention.k_layernorm(k.transpose(1, 2))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q, k, v


def position_scale(config: Any, position_BT: Tensor) -> Tensor:
    """[B,T,1,1]: the factor that scales queries: 1 + beta log(1 + floor(position / original context length)).

    position_BT: -1 on padding.
    """
    beta, length = (
        config.rope_parameters[name] for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    steps_BT = torch.floor(position_BT.clamp_min(0) / length)
    return (1 + beta * torch.log1p(steps_BT))[:, :, None, None]
