"""The layer that takes the place of softmax attention: the family's own projections, a window, and a mixer beside it.

Shapes: B batch, T tokens, S = tokens of the ring + T, M sinks, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as nnf
from gated_kernels.fused_step.chunk import StepInputs, is_supported
from gated_kernels.swa.chunk import chunk_swa
from torch import Tensor, nn

from liger_convert.mixers import build_mixer, make_spec
from liger_convert.mixers.base import Beside, Branches, HeadDims, Heads, WindowRead
from liger_convert.model.cache import LinearizedCacheLayer
from liger_convert.model.families import family_of, head_dim, project_qkv
from liger_convert.model.sequence import SequenceLayout, Sinks

MIXER_MODULE = "mixer"


def head_dims(config: Any) -> HeadDims:
    """The sizes of one attention layer of a base's or linearized model's config."""
    return HeadDims(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim(config))


class LinearizedAttention(nn.Module):
    """Adopts the projections and norms of a family's attention module under their own names; all that is new stands in
    its child `mixer`."""

    mixer: Any

    def __init__(self, attention: Any, config: Any, layer_idx: int):
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.family, self.dims, self.layer_idx = family_of(config), head_dims(config), layer_idx
        self.scaling: float = attention.scaling
        self.clip: float | None = getattr(config, "clip_qkv", None)
        self.rotates: bool = getattr(attention, "use_rope", True)
        self.rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        resolved = config.linearization["mixers"][config.linearization["layers"][layer_idx]]
        self.spec = make_spec(resolved)
        self.add_module(MIXER_MODULE, build_mixer(resolved, self.dims))
        self.branches: Branches = "both"

    def qkv(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """[B,T,H,D], [B,T,G,D] and [B,T,G,D], before rotary."""
        return project_qkv(self, self.family, self.dims.dim, self.dims.kv_heads, x_BTC)

    def project(self, x_BTC: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """q, k before and after rotary and v: [B,T,H,D], [B,T,G,D], the same rotated, [B,T,G,D]."""
        q, k, v = self.qkv(x_BTC)
        q_rot, k_rot = self.rotate(q, k, *position_embeddings, unsqueeze_dim=2) if self.rotates else (q, k)
        if q.is_cuda:  # the angles are float32 under autocast, and would make the window's products that, too
            q_rot, k_rot = q_rot.to(q.dtype), k_rot.to(k.dtype)
        return q, k, q_rot, k_rot, v

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layout: SequenceLayout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [B,T,C] -> ([B,T,C], None). The mask is the kept layers'; this layer goes by `layout`."""
        if layout is None:
            raise ValueError("a linearized layer is run by its model, which passes it the batch's layout")
        past = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if past is not None and past.static and past.taken is not None:
            token = self.token(hidden_states, position_embeddings, layout, past)
            o_BTHD = self.mixer(token, None, layout, past, self.branches)
        else:
            heads, see = self.look(hidden_states, position_embeddings, layout, past)
            o_BTHD = self.mixer(heads, see, layout, past, self.branches)
        if past is not None:
            past.advance(layout.tokens)
        return getattr(self, self.family.projections[-1])(o_BTHD.flatten(2)), None

    def prepare(self, layout: SequenceLayout) -> None:
        """Has `layout` work out, once for all equal layers, what a pass without a cache asks it for."""
        sight = layout.look(None, self.spec.keep, self.spec.sinks)
        if self.spec.window and self.spec.scope == "evicted":
            layout.written_on_eviction(sight.rank_BS, self.spec.window, self.spec.sinks)

    def fuse(self, past: LinearizedCacheLayer, taken: Tensor) -> bool:
        """Has this layer take its steps fused, its cache, in its fixed shape, going round by `taken`; False where it
        cannot."""
        rules = self.mixer.step_rules()
        if rules is None or self.branches != "both" or (self.rotates and not _turns_halves(self.rotate)):
            return False
        return past.fuse(taken, lambda kept: is_supported(kept, rules, self.dims.heads))

    def token(
        self,
        x_B1C: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        layout: SequenceLayout,
        past: LinearizedCacheLayer,
    ) -> StepInputs:
        """What a fused step takes of the one new token."""
        q, k, v = (x[:, 0] for x in self.qkv(x_B1C))
        cos, sin = (x[:, 0] for x in position_embeddings) if self.rotates else (None, None)
        rank_BS, _, sinks = layout.look(past, self.spec.keep, self.spec.sinks)
        return StepInputs(q, k, v, cos, sin, rank_BS, None if sinks is None else sinks.visible_BTM[:, 0], self.scaling)

    def look(
        self,
        x_BTC: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        layout: SequenceLayout,
        past: LinearizedCacheLayer | None,
    ) -> tuple[Heads, WindowRead]:
        """The heads of the new tokens, and what gives them the window's and the sinks' output and log-sum-exp."""
        q_BTHD, k_BTGD, q_rot_BTHD, k_rot_BTGD, v_BTGD = self.project(x_BTC, position_embeddings)
        keep = self.spec.keep
        k_rot_BSGD = layout.extend(past, "k", k_rot_BTGD, keep)
        v_BSGD = layout.extend(past, "v", v_BTGD, keep)
        rank_BS, valid_BS, sinks = layout.look(past, keep, self.spec.sinks)
        sink_k_BMGD = _sink_tokens(past, "k", sinks, k_rot_BTGD)
        sink_v_BMGV = _sink_tokens(past, "v", sinks, v_BTGD)

        def see(log_f_BTG: Tensor | None, beside: Beside | None) -> tuple[Tensor, Tensor]:
            q, k, sink_k = q_rot_BTHD, k_rot_BSGD, sink_k_BMGD
            if log_f_BTG is not None:
                if layout.valid_BT is not None:
                    log_f_BTG = torch.where(layout.valid_BT[..., None], log_f_BTG, 0)
                log_f_BSG = layout.extend(past, "log_f", log_f_BTG, keep)
                q, k, sink_k = with_forgetting(q, k, sink_k, log_f_BSG / self.scaling)
            return chunk_swa(
                q,
                k,
                v_BSGD,
                window_size=self.spec.window or k.shape[1],
                scale=self.scaling,
                valid_BS=valid_BS,
                segment_ids_BS=layout.document_BT,
                sink_k_BMGD=sink_k,
                sink_v_BMGV=sink_v_BMGV,
                sink_visible_BTM=None if sinks is None else sinks.visible_BTM,
                memory_BTHV=None if beside is None else beside.memory_BTHV,
                normalizer_BTH=None if beside is None else beside.mass_BTH,
                memory_logit_BTH=None if beside is None else beside.log_weight_BTH,
                mix_weight_H=None if beside is None else beside.share_H,
            )

        return Heads(q_BTHD, k_BTGD, q_rot_BTHD, k_rot_BTGD, v_BSGD, rank_BS, x_BTC), see


@cache
def _turns_halves(rotate: Any) -> bool:
    """Whether a family's rotary turns channel c with channel c + D / 2: tried out on numbers."""
    x, cos, sin = torch.tensor([[2.0, 3, 5, 7], [11, 13, 17, 19], [23, 29, 31, 37]])[:, None, None]
    turned = x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin
    return all(torch.equal(found[0], turned) for found in rotate(x[None], x[None], cos, sin, unsqueeze_dim=2))


def with_forgetting(
    q_BTHD: Tensor, k_BSGD: Tensor, sink_k_BMGD: Tensor | None, log_f_BSG: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k and the sinks' k with two channels more, which add the log_f after key s up to query t to their product.

    The product of [q, c_t, 1] and [k, 1, -c_s], c being the sums of log_f from the ring's first token: in at least
    float32, where a sum c of 1,000 is exact to 1e-4. To a sink, [k, 0, 0], they add nothing.
    """
    T, R = q_BTHD.shape[1], q_BTHD.shape[2] // k_BSGD.shape[2]
    c_BSG1 = log_f_BSG.cumsum(1)[..., None]
    c_BTH1 = c_BSG1[:, -T:].repeat_interleave(R, 2)
    q = torch.cat((q_BTHD.to(log_f_BSG.dtype), c_BTH1, torch.ones_like(c_BTH1)), -1)
    k = torch.cat((k_BSGD.to(log_f_BSG.dtype), torch.ones_like(c_BSG1), -c_BSG1), -1)
    return q, k, None if sink_k_BMGD is None else nnf.pad(sink_k_BMGD.to(log_f_BSG.dtype), (0, 2))


def _sink_tokens(past: LinearizedCacheLayer | None, name: str, sinks: Sinks | None, new_BTGD: Tensor) -> Tensor | None:
    """[B,M,G,D]: the keys or values of the sinks, from the new tokens or from the cache, which keeps them."""
    if sinks is None:
        return None
    if sinks.index_BM is None or sinks.found_BM is None:
        assert past is not None
        return past.sinks[name]
    index = sinks.index_BM[:, :, None, None].expand(-1, -1, *new_BTGD.shape[2:])
    found = sinks.found_BM[:, :, None, None]
    old = None if past is None else past.sinks.get(name)
    tokens_BMGD = torch.where(found, new_BTGD.gather(1, index), new_BTGD.new_zeros(()) if old is None else old)
    if past is not None:
        past.write(past.sinks, name, tokens_BMGD)
    return tokens_BMGD
