"""The layer that replaces softmax attention: the family's own projections, a window, and a mixer.

Shapes: B batch, T tokens, S = tokens in the ring + T, M sinks, H query heads, G key-value heads, D head size,
C hidden size.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from gated_kernels.common.registry import kernel_for
from gated_kernels.fused_step.arguments import StepCache, StepInputs
from gated_kernels.fused_step.chunk import is_supported, is_supported_in_torch
from torch import Tensor, nn

from liger_convert.mixers import build_mixer, make_spec
from liger_convert.mixers.base import QKV, Branches, HeadDims, extend, window_metadata
from liger_convert.mixers.window_attention import WindowInputs
from liger_convert.model.cache import LinearizedCacheLayer
from liger_convert.model.families import family_of, head_dim, own_windows, position_scale, project_qkv, rotates
from liger_convert.model.sequence import SequenceMetadata, Sinks, WindowMetadata

MIXER_MODULE = "mixer"


def head_dims(config: Any) -> HeadDims:
    """The sizes of one attention layer, from the config of a base or a linearized model."""
    return HeadDims(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim(config))


class LinearizedAttention(nn.Module):
    """A linearized attention layer.

    It keeps the projections and norms of the family's attention module under their original names. All new parameters
    are in the child module `mixer`.
    """

    mixer: Any

    def __init__(self, attention: Any, config: Any, layer_idx: int):
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.family, self.dims, self.layer_idx = family_of(config), head_dims(config), layer_idx
        self.scaling: float = attention.scaling
        self.base_window = own_windows(config)[layer_idx]  # may differ from the linearized layer's window
        self.softcap: float | None = attention.attn_logit_softcapping if self.family.softcap else None
        self.output_dropout: float = attention.residual_dropout if self.family.output_dropout else 0.0
        self.clip: float | None = getattr(config, "clip_qkv", None)
        self.config = config
        self.rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        resolved = config.linearization["mixers"][config.linearization["layers"][layer_idx]]
        self.spec = make_spec(resolved)
        self.rotates: bool = rotates(self.family, attention, self.base_window) and self.spec.rotates
        self.add_module(MIXER_MODULE, build_mixer(resolved, self.dims))
        self.branches: Branches = "both"

    def qkv(
        self, x_BTC: Tensor, metadata: SequenceMetadata, past: LinearizedCacheLayer | None = None
    ) -> tuple[Tensor, ...]:
        """Queries [B,T,H,D], keys [B,T,G,D] and values [B,T,G,D], before rotary."""
        return self.prepared(self.base_qkv(x_BTC), x_BTC, metadata, past)

    def base_qkv(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """As `qkv`, by the family's modules alone: a token's result depends on that token only."""
        return project_qkv(self, self.family, self.dims.dim, self.dims.kv_heads, x_BTC)

    def prepared(
        self,
        base_qkv: tuple[Tensor, ...],
        x_BTC: Tensor,
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None = None,
    ) -> tuple[Tensor, ...]:
        """As `qkv`, given the output of `base_qkv`."""
        q, k, v = base_qkv
        if self.spec.shift != "none" or self.spec.normalizes_qk:
            q, k, v = self.mixer("prepare", q, k, v, x_BTC, metadata, past)
        if self.family.position_scale:
            q = q * position_scale(self.config, metadata.position_BT).to(q.dtype)
        return q, k, v

    def project(
        self,
        x_BTC: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None = None,
    ) -> tuple[Tensor, ...]:
        """q [B,T,H,D] and k [B,T,G,D] before rotary, q and k of the same shapes after rotary, and v [B,T,G,D]."""
        return self.rotated(self.qkv(x_BTC, metadata, past), position_embeddings)

    def rotated(self, qkv: tuple[Tensor, ...], position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """As `project`, given the output of `qkv`."""
        q, k, v = qkv
        if not self.rotates:
            return q, k, q, k, v
        kernel = None if self.family.rotary == "pairs" else kernel_for("rotary")
        found = None if kernel is None else kernel(q, k, *position_embeddings)
        if found is not None:
            q_rot, k_rot = found
        elif self.family.rotary == "split_halves":
            n = position_embeddings[0].shape[-1]
            q_rot, k_rot = self.rotate(q[..., :n], k[..., :n], *position_embeddings, unsqueeze_dim=2)
            q_rot, k_rot = torch.cat((q_rot, q[..., n:]), -1), torch.cat((k_rot, k[..., n:]), -1)
        else:
            q_rot, k_rot = self.rotate(q, k, *position_embeddings, unsqueeze_dim=2)
        if q.is_cuda:  # under autocast the angles are float32 and would promote the window's matmuls to float32
            q_rot, k_rot = q_rot.to(q.dtype), k_rot.to(k.dtype)
        return q, k, q_rot, k_rot, v

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Any, ...],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        metadata: SequenceMetadata | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [B,T,C] -> ([B,T,C], None).

        `attention_mask` is ignored: it is for the softmax layers, and this layer uses `metadata`. `past_key_values` is
        the name of `cache` in transformers before 5.24. Where the family's decoder layer does not pass extra arguments
        on, `metadata` is the third item of `position_embeddings`, after cos and sin (see `hand_on_metadata`). Raises
        ValueError when there is no metadata.
        """
        if metadata is None and len(position_embeddings) == 3:
            metadata = position_embeddings[2]
        if metadata is None:
            raise ValueError("a linearized layer is run by its model, which passes it the batch's metadata")
        hidden_states = metadata.ordered(hidden_states)
        angles = metadata.ordered(position_embeddings[0]), metadata.ordered(position_embeddings[1])
        cache = past_key_values if cache is None else cache
        past = metadata.past if cache is None else cache.layers[self.layer_idx]
        if past is not None and past.static and past.fused:
            step_inputs = self.prepare_step(hidden_states, angles, metadata, past)
            o_BTHD = self.mixer("decode_step", step_inputs, past.step_cache())
        else:
            qkv, window_inputs = self.prepare_inputs(hidden_states, angles, metadata, past)
            o_BTHD = self.mixer("prefill", qkv, window_inputs, metadata, past, self.branches)
        output_BTC = getattr(self, self.family.projections[-1])(o_BTHD.flatten(2))
        return F.dropout(metadata.restored(output_BTC), self.output_dropout, self.training), None

    def window_metadata(self, metadata: SequenceMetadata, past: LinearizedCacheLayer | None) -> WindowMetadata:
        """The batch metadata for this layer's window."""
        return window_metadata(self.spec, metadata, past)

    def prepare_metadata(self, metadata: SequenceMetadata, past: LinearizedCacheLayer | None = None) -> None:
        """Precomputes in `metadata` what a forward over new tokens needs, once for all layers with equal windows."""
        window = self.window_metadata(metadata, past)
        evicted = self.spec.scope == "evicted"
        if self.spec.window or not evicted:
            metadata.write_mask_of_heads(self.dims.kv_heads, window if evicted else None)

    def enable_fused_step(self, past: LinearizedCacheLayer, in_torch: bool = False) -> bool:
        """Switches the static decode steps of this layer and its cache to the fused step.

        in_torch: the one in torch for a CPU, instead of kernels. Returns whether it supports this layer; False leaves
        the steps unfused.
        """
        cache = past.step_cache()
        past.fused = cache is not None and self.has_fused_step(cache, in_torch)
        return past.fused

    def has_fused_step(self, cache: StepCache, in_torch: bool = False) -> bool:
        """Whether a fused kernel takes this layer's decode steps over `cache`. in_torch: see `enable_fused_step`."""
        config = self.mixer.step_config()
        if config is None or self.branches != "both":
            return False
        if self.softcap is not None or (self.rotates and self.family.rotary == "pairs"):
            return False
        return (is_supported_in_torch if in_torch else is_supported)(cache, config, self.dims.heads)

    def prepare_step(
        self,
        x_B1C: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer,
    ) -> StepInputs:
        """The inputs of a fused decode step for one new token [B,1,C]."""
        q, k, v = (x[:, 0] for x in self.qkv(x_B1C, metadata))
        cos, sin = (x[:, 0] for x in position_embeddings) if self.rotates else (None, None)
        window = self.window_metadata(metadata, past)
        visible_BM = None if window.sinks is None else window.sinks.visible_BTM[:, 0]
        return StepInputs(q, k, v, cos, sin, window.position_BS, visible_BM, self.scaling)

    def prepare_inputs(
        self,
        x_BTC: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None,
    ) -> tuple[QKV, WindowInputs]:
        """The projections of the new tokens and the window's inputs. Updates the rings of `past`."""
        projected = self.project(x_BTC, position_embeddings, metadata, past)
        return self.extend_window(projected, x_BTC, metadata, past)

    def extend_window(
        self,
        projected: tuple[Tensor, ...],
        x_BTC: Tensor,
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None,
    ) -> tuple[QKV, WindowInputs]:
        """As `prepare_inputs`, given the output of `project` for the new tokens."""
        q_BTHD, k_BTGD, q_rot_BTHD, k_rot_BTGD, v_BTGD = projected
        window = self.window_metadata(metadata, past)
        k_rot_BSGD = extend(past, "k", k_rot_BTGD, window)
        v_BSGD = extend(past, "v", v_BTGD, window)
        sinks = (_sink_tokens(past, "k", window.sinks, k_rot_BTGD), _sink_tokens(past, "v", window.sinks, v_BTGD))
        seen = window, self.spec.window
        inputs = WindowInputs(q_rot_BTHD, k_rot_BSGD, v_BSGD, *sinks, *seen, self.scaling, self.softcap)
        return QKV(q_BTHD, k_BTGD, q_rot_BTHD, k_rot_BTGD, v_BSGD, window.position_BS, x_BTC), inputs


def hand_on_metadata(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook for a decoder layer that does not pass extra keyword arguments on to its attention.

    It appends the metadata to the rotary's (cos, sin), which every such decoder layer passes on unchanged.
    """
    if not isinstance(layer.self_attn, LinearizedAttention):
        return None  # the base's attention is swapped in for now, as during layer selection
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (cos, sin, kwargs["metadata"])}


def _sink_tokens(past: LinearizedCacheLayer | None, name: str, sinks: Sinks | None, new_BTGD: Tensor) -> Tensor | None:
    """[B,M,G,D]: the keys or values of the sinks, from the new tokens or from the cache. Updates the cache."""
    if sinks is None:
        return None
    if sinks.index_BM is None or sinks.found_BM is None:
        assert past is not None
        return past.sinks[name]
    if sinks.lead:
        tokens_BMGD = new_BTGD[:, : sinks.index_BM.shape[1]]
        if past is None:
            return tokens_BMGD
        # clone: a view would keep the whole prompt alive
        return past.write_sinks(name, tokens_BMGD if past.static else tokens_BMGD.clone())
    index = sinks.index_BM[:, :, None, None].expand(-1, -1, *new_BTGD.shape[2:])
    found = sinks.found_BM[:, :, None, None]
    old = None if past is None else past.read_sinks(name, new_BTGD, sinks)
    tokens_BMGD = torch.where(found, new_BTGD.gather(1, index), new_BTGD.new_zeros(()) if old is None else old)
    return tokens_BMGD if past is None else past.write_sinks(name, tokens_BMGD)
