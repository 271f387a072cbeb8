"""A linearized layer in vLLM: the project's own layer and mixer, with its cache in pages that vLLM allocates.

Shapes: N tokens of a batch of requests, C hidden size, H query heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from liger_convert.model.attention import LinearizedAttention
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.serving.layer import attend_batch
from liger_convert.serving.page import PageLayout
from liger_convert.serving.rows import Rows, Views, make_rows


class Step(NamedTuple):
    """The requests of a step. seq_lens: the length of each request after the step, int [number of requests]."""

    rows: list[Rows]
    seq_lens: Tensor


class StepBuilder(LinearAttentionMetadataBuilder):
    """Builds the rows of a step once. Layers with another block table reuse the rows with their own pages."""

    supports_update_block_table = True

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1]
        # the bound is exact without speculation, which is refused; reading the device would wait for the previous step
        seen = batch.seq_lens_cpu_upper_bound[: batch.num_reqs] - starts.diff()
        pages = self._pages(batch.block_table_tensor, batch.seq_lens)
        return Step(make_rows(starts.tolist(), seen.tolist(), pages), batch.seq_lens)

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        pages = self._pages(blk_table, metadata.seq_lens)
        return metadata._replace(rows=[rows.on_pages(pages) for rows in metadata.rows])

    def _pages(self, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        """int64: the page of every request."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        return mamba_get_block_table_tensor(block_table, seq_lens, self.kv_cache_spec, mode)[:, 0].long()


class StepBackend(LinearAttentionBackend):
    """The vLLM attention backend that provides the metadata builder for these layers."""

    @staticmethod
    def get_name() -> str:
        return "LINEARIZED"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder


class ServedAttention(LinearizedAttention, MambaBase):
    """A served `LinearizedAttention`; `serve` converts a layer to this class in place."""

    mamba_type = MambaAttentionBackendEnum.LINEAR
    kv_cache: tuple[Tensor, ...] = ()
    prefix: str
    layout: PageLayout
    page_words: int
    views: Views

    @classmethod
    def serve(cls, attention: LinearizedAttention, prefix: str, layout: PageLayout, page_words: int) -> None:
        """Converts `attention` to a served layer and registers it with vLLM as `prefix`.

        page_words: the size of a page in float32 words.
        """
        attention.__class__ = cls
        assert isinstance(attention, cls)
        attention.prefix, attention.layout, attention.page_words, attention.views = prefix, layout, page_words, []
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = attention

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.page_words,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StepBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        self.views = self.layout.views(self.kv_cache[0])

    def prepare_metadata(self, metadata: SequenceMetadata) -> None:
        """Does nothing: there is no metadata that all requests of a batch share."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Any, ...],
        attention_mask: Tensor | None = None,
        metadata: SequenceMetadata | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [1,N,C] -> ([1,N,C], None): the new tokens of all requests, concatenated."""
        if metadata is None:
            metadata = position_embeddings[2]  # see `hand_on_metadata`
        angles = position_embeddings[0], position_embeddings[1]
        projected = tuple(heads[0] for heads in self.project(hidden_states, angles, metadata))
        steps = get_forward_context().attn_metadata
        rows = [] if steps is None else steps[self.prefix].rows  # None: vLLM's memory profiling run
        o_NHD = attend_batch(self, self.layout, self.views, rows, hidden_states[0], projected)
        return getattr(self, self.family.projections[-1])(o_NHD.flatten(1)[None]), None
