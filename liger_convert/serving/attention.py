"""A linearized layer in vLLM: the project's own layer and mixer, with its cache in pages that vLLM allocates.

What a layer does between its projections depends on the lengths of the requests. For torch.compile this is one op,
`ATTEND`, which it does not look into.

Shapes: N tokens of a batch of requests, C hidden size, H query heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from liger_convert.model.attention import LinearizedAttention
from liger_convert.serving.batch import Batch
from liger_convert.serving.layer import LayerPages, StepTensors, attend_batch
from liger_convert.serving.page import PageLayout
from liger_convert.serving.settings import ATTEND
from liger_convert.serving.warm_up import WARMED_UP, WarmUp
from liger_convert.utils.errors import LinearizeError

METADATA = "linearized"  # where a forward context holds the StepMetadata of its step


class Step(NamedTuple):
    """The requests of a step. seq_lens: the length of each request after the step, int [number of requests]."""

    batch: Batch
    seq_lens: Tensor


class StepBuilder(LinearAttentionMetadataBuilder):
    """Builds the batch of a step once. Layers with another block table reuse it with their own pages.

    A captured step reads the pages and numbers of tokens of its requests from the builders' buffers.
    """

    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._most = vllm_config.scheduler_config.max_num_batched_tokens
        self._buffers = torch.zeros(2, vllm_config.scheduler_config.max_num_seqs, dtype=torch.long, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1]
        # the bound is exact without speculation, which is refused; reading the device would wait for the previous step
        seen = batch.seq_lens_cpu_upper_bound[: batch.num_reqs] - starts.diff()
        seen_R = self._buffers[1, : batch.num_reqs]
        seen_R.copy_(batch.seq_lens[: batch.num_reqs] - 1)  # -1 for padding, whose length is 0
        page_R = self._pages(batch.block_table_tensor, batch.seq_lens, batch.num_reqs)
        return self._cleared(Step(Batch(starts.tolist(), seen.tolist(), page_R, seen_R, self._most), batch.seq_lens))

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        page_R = self._pages(blk_table, metadata.seq_lens, len(metadata.batch.page_R))
        return self._cleared(metadata._replace(batch=metadata.batch.on_pages(page_R)))

    def _pages(self, block_table: Tensor, seq_lens: Tensor, requests: int) -> Tensor:
        """int64: the page of every request. Padding has page 0, vLLM's null block, which belongs to no request."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(block_table[:requests], seq_lens[:requests], self.kv_cache_spec, mode)
        return self._buffers[0, :requests].copy_(table[:, 0])

    def _cleared(self, step: Step) -> Step:
        """Clears the pages of new requests, before any layer of the step runs."""
        new_pages = step.batch.new_pages()
        if new_pages is not None:
            layers = self.vllm_config.compilation_config.static_forward_context
            for name in self.layer_names:
                layers[name].clear(new_pages)
        return step


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
    prefix: str
    layout: PageLayout
    warm_up: WarmUp
    page_words: int
    pages: LayerPages | None
    captured: bool

    @classmethod
    def serve(
        cls, attention: LinearizedAttention, prefix: str, layout: PageLayout, warm_up: WarmUp, page_words: int
    ) -> None:
        """Converts `attention` to a served layer and registers it with vLLM as `prefix`.

        warm_up: that of all layers of `layout`. page_words: the size of a page in float32 words.
        """
        attention.__class__ = cls
        assert isinstance(attention, cls)
        attention.prefix, attention.layout, attention.warm_up = prefix, layout, warm_up
        attention.page_words, attention.kv_cache = page_words, ()
        compilation = get_current_vllm_config().compilation_config
        attention.captured = compilation.cudagraph_mode.has_full_cudagraphs()
        compilation.static_forward_context[prefix] = attention

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.page_words,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StepBackend

    @property
    def kv_cache(self) -> Any:
        """The tensors that vLLM has bound, or an empty sequence."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: Any) -> None:
        # vLLM unbinds the small cache of its memory profiling, which must then be freed
        self._kv_cache, self.pages = kv_cache, None

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        self.pages = LayerPages(self, self.layout, self.kv_cache[0])
        if self.captured and not self.pages.fused:
            raise LinearizeError(
                f"{self.prefix} has no fused step, so its steps cannot be captured: use --enforce-eager"
            )

    def clear(self, pages: Tensor) -> None:
        """Clears these pages, int64, if the fused step will read them."""
        if self.pages is not None and self.pages.fused:
            self.pages.clear(pages)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: tuple[Any, ...], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1,N,C] -> ([1,N,C], None): the new tokens of all requests, concatenated."""
        cos_1ND, sin_1ND = position_embeddings[:2]
        q_1NHD, k_1NGD, v_1NGD = self.base_qkv(hidden_states)
        step = StepTensors(hidden_states, q_1NHD, k_1NGD, v_1NGD, cos_1ND, sin_1ND)
        # a CUDA graph that begins after the op reads this tensor where the graph before it allocated it
        o_NHD = q_1NHD.new_empty(q_1NHD.shape[1:])
        op = torch.ops.liger_convert.attend if torch.compiler.is_compiling() else attend
        op(*step, o_NHD, self.prefix)
        return getattr(self, self.family.projections[-1])(o_NHD.flatten(1)[None]), None

    def attend(self, step: StepTensors, o_NHD: Tensor) -> None:
        """Writes the layer's output before its output projection to `o_NHD`."""
        context = get_forward_context()
        metadata = context.additional_kwargs[METADATA]
        # none when vLLM measures its memory; when it tunes other kernels, the softmax layers alone have metadata
        requests = (context.attn_metadata or {}).get(self.prefix)
        if requests is None or self.pages is None:
            if o_NHD.device.type in WARMED_UP:
                self.warm_up.run(self, step, metadata.position_BT)
            o_NHD.zero_()
        else:
            attend_batch(self, self.pages, requests.batch, step, metadata, o_NHD)


# torch reads the op's schema from these annotations, and looks their names up in the module of vLLM's decorator
@eager_break_during_capture
def attend(
    x_1NC: torch.Tensor,
    q_1NHD: torch.Tensor,
    k_1NGD: torch.Tensor,
    v_1NGD: torch.Tensor,
    cos_1ND: torch.Tensor,
    sin_1ND: torch.Tensor,
    o_NHD: torch.Tensor,
    layer: str,
) -> None:
    """The op `ATTEND`: `ServedAttention.attend` of the layer of this name."""
    step = StepTensors(x_1NC, q_1NHD, k_1NGD, v_1NGD, cos_1ND, sin_1ND)
    get_forward_context().no_compile_layers[layer].attend(step, o_NHD)


def _attend_fake(*args: Any) -> None:
    """Writes nothing, for tracing."""


_NAMESPACE, _NAME = ATTEND.split("::")
LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
direct_register_custom_op(_NAME, attend, ["o_NHD"], _attend_fake, LIBRARY)
