"""The vLLM plugin, an entry point in `vllm.general_plugins`; vLLM calls `register` in every process."""

from __future__ import annotations

import logging
from typing import Any

from gated_kernels import kernel_for

logger = logging.getLogger("vllm.liger_convert")  # vLLM shows the messages of its own loggers


def choose_execution(vllm_config: Any) -> None:
    """Makes vLLM capture decoding as CUDA graphs if all linearized layers allow it, and run all else eagerly.

    Nothing is compiled. A user's `enforce_eager` is kept, and so is a `cudagraph_mode` of NONE.
    """
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    from liger_convert.serving.settings import layouts, why_not_captured

    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    processes = vllm_config.parallel_config.tensor_parallel_size
    config, reason = model.hf_config, None
    if model.enforce_eager or compilation.cudagraph_mode == CUDAGraphMode.NONE:
        reason = "the settings ask for it"
    elif not current_platform.is_cuda():
        reason = "only Nvidia's GPUs have CUDA graphs"
    elif kernel_for("fused_step") is None:
        reason = "the Triton kernels are not in use"
    else:
        reason = why_not_captured(config, layouts(config, model.dtype, processes))
    if reason is None:
        compilation.mode, compilation.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
        logger.info("Linearized model: steps in which all requests decode are captured as CUDA graphs.")
    else:
        model.enforce_eager = True
        logger.info("Linearized model: no CUDA graphs are captured, because %s.", reason)


def register() -> None:
    """Registers the linearized models with vLLM. Their classes are imported when one is served."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from liger_convert.model import CLASSES
    from liger_convert.model.families import FAMILIES
    from liger_convert.serving.settings import check_settings, layouts, mark_layers

    class LinearizedConfig(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            layouts(model_config.hf_config, model_config.dtype)  # refuses mixers that are not served
            mark_layers(model_config.hf_config)

        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            check_settings(vllm_config)
            choose_execution(vllm_config)

    for model_type, (_, _, model) in CLASSES.items():
        served = "ServedMoEForCausalLM" if FAMILIES[model_type].moe else "ServedForCausalLM"
        ModelRegistry.register_model(model.__name__, f"liger_convert.serving.model:{served}")
        MODELS_CONFIG_MAP[model.__name__] = LinearizedConfig
