"""Linearized models in vLLM, on its Transformers backend, which runs a family's own modules with vLLM's layers."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM
from vllm.model_executor.models.transformers.base import PreTrainedModelClasses
from vllm.model_executor.models.transformers.utils import init_on_device_without_buffers
from vllm.platforms import current_platform

from liger_convert.mixers import build_mixer
from liger_convert.model.attention import MIXER_MODULE
from liger_convert.model.configuration import linear_layers
from liger_convert.model.modeling import LinearizedModel
from liger_convert.serving.attention import METADATA, ServedAttention
from liger_convert.serving.batch import StepMetadata
from liger_convert.serving.cpu import spare_generators, take_all_inputs
from liger_convert.serving.settings import base_layer_types, layouts, page_words
from liger_convert.serving.split import share_of_heads, share_of_parameter
from liger_convert.serving.warm_up import WarmUp

if TYPE_CHECKING:
    Backend = Any
else:
    Backend = object  # each served class adds its own


if current_platform.is_cpu():
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    spare_generators(CPUModelRunner)
    take_all_inputs(CPUInt8ScaledMMLinearKernel)


class _NoSoftmax:
    """A placeholder for linearized layers where the backend expects softmax attention."""

    def scale(self, module: Any) -> float:
        return 1.0

    def sinks(self, module: Any) -> None:
        return None


class ServedBackbone(LinearizedModel):
    """A backbone that vLLM compiles, unless its settings say otherwise."""

    def __init__(self) -> None:
        """Makes no modules: this is called for a backbone that has them, with what vLLM adds to compile it."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The forward of the family's own class: vLLM knows the requests, and layers here share no metadata."""
        tokens = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        return super(LinearizedModel, self).forward(**tokens, metadata=None, **kwargs)


class Served(Backend):
    """The mixin that adds linearized layers to the backend. All state of a layer is one tensor, its page."""

    has_inner_state = True
    is_hybrid = True
    supports_mamba_prefix_caching = True
    supports_lora = False
    supports_pp = False

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.tp_group.world_size > 1:
            self._load_shares()
        # Granite divides its logits outside the backbone, which is all that the backend runs
        self.logits_processor.scale /= getattr(self.config, "logits_scaling", 1.0)

    @cached_property
    def _from_config_kwargs(self) -> dict[str, Any]:
        config = copy.deepcopy(self.config)
        if (of_base := base_layer_types(config)) is not None:
            config.layer_types = of_base
        return {**super()._from_config_kwargs, "config": config}

    def _decorate_for_torch_compile(self) -> None:
        """Does nothing yet: vLLM would change the class of the backbone for all models of this process."""

    @cached_property
    def _pre_trained_model_classes(self) -> PreTrainedModelClasses:
        """A class of the backbone for this model alone."""
        base = type(self.model)
        decoder = type(f"Served{base.__name__}", (ServedBackbone, base), {"__module__": __name__})
        return PreTrainedModelClasses(decoder, {})

    def recursive_replace(self) -> None:
        super()._decorate_for_torch_compile()
        self.model.__class__ = self._pre_trained_model_classes.decoder
        self.model.__init__(vllm_config=self.vllm_config)
        layers = {i: self.model.layers[i].self_attn for i in linear_layers(self.config)}
        mixers = {i: layer._modules.pop(MIXER_MODULE) for i, layer in layers.items()}  # kept out of the replacement
        super().recursive_replace()
        processes = self.tp_group.world_size
        of_layers = layouts(self.config, self.model_config.dtype, processes)
        warm_ups = {layout: WarmUp(layout) for layout in of_layers.values()}
        for i, layer in layers.items():
            layer.add_module(MIXER_MODULE, mixers[i] if processes == 1 else self._share_of_mixer(layer))
            prefix = f"model.layers.{i}.self_attn"
            layout = of_layers[i]
            ServedAttention.serve(layer, prefix, layout, warm_ups[layout], page_words(of_layers))
            self.attention_fusers[i] = prefix, _NoSoftmax()

    def _share_of_mixer(self, layer: Any) -> Any:
        """This process's mixer on the meta device, with its share of the heads."""
        layer.dims = share_of_heads(layer.dims, self.tp_group.world_size)
        config = self.config.linearization
        with init_on_device_without_buffers("meta"):
            return build_mixer(config["mixers"][config["layers"][layer.layer_idx]], layer.dims)

    def _load_shares(self) -> None:
        """Makes vLLM load only this process's part of the mixers' parameters."""
        process = self.tp_group.rank_in_group

        def load(parameter: Tensor, saved: Tensor) -> None:
            parameter.data.copy_(share_of_parameter(saved, parameter, process))

        for i in linear_layers(self.config):
            for parameter in self.model.layers[i].self_attn.mixer.parameters():
                parameter.weight_loader = load

    def _get_attn_cls(self) -> Any:
        """Creates vLLM attention for the softmax layers only."""
        softmax, served = super()._get_attn_cls(), {f"model.layers.{i}.self_attn" for i in linear_layers(self.config)}

        def make(**kwargs: Any) -> Any:
            return None if kwargs["prefix"].removesuffix(".attn") in served else softmax(**kwargs)

        return make

    def forward(self, input_ids: Tensor | None, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        # beside the arguments, which torch.compile takes apart
        get_forward_context().additional_kwargs[METADATA] = StepMetadata(positions)
        return super().forward(input_ids, positions, *args, **kwargs)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        model, processes = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        return ((page_words(layouts(model.hf_config, model.dtype, processes)),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())


class ServedForCausalLM(Served, TransformersForCausalLM):
    """For families without experts."""


class ServedMoEForCausalLM(Served, TransformersMoEForCausalLM):
    """For families with experts."""
