"""The vLLM plugin, an entry point in `vllm.general_plugins`; vLLM calls `register` in every process."""

from __future__ import annotations

import logging
from typing import Any

from gated_kernels import kernel_for

ASKED = "the settings ask for it"
KV_UPDATES = ["vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"]
logger = logging.getLogger("vllm.liger_convert")  # vLLM shows the messages of its own loggers


def choose_execution(vllm_config: Any) -> None:
    """Decides what of a linearized model vLLM compiles, and what it captures as CUDA graphs.

    What is compiled is split at the linearized layers' own op. Steps in which all requests decode are captured as one
    graph if all linearized layers allow it, others piece by piece if the model is compiled. What a user turned off
    stays off: `enforce_eager`, a compilation `mode` of NONE, a `cudagraph_mode` of NONE.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    plain, whole = _why_not_compiled(vllm_config), _why_not_captured(vllm_config)
    if plain is None:
        logger.info("Linearized model: all but the linear layers' own op is compiled.")
        _split(compilation)
    else:
        logger.info("Linearized model: nothing is compiled, because %s.", plain)
        compilation.mode = CompilationMode.NONE
    if whole is None:
        logger.info("Linearized model: steps in which all requests decode are captured as CUDA graphs.")
        if plain is not None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        elif compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    else:
        logger.info("Linearized model: no step is captured as one CUDA graph, because %s.", whole)
        if plain is not None:
            model.enforce_eager = True
        elif compilation.cudagraph_mode != CUDAGraphMode.NONE:
            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def _why_not_compiled(vllm_config: Any) -> str | None:
    """The reason why nothing is compiled; None if vLLM is to compile."""
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    from liger_convert.serving.settings import has_dynamic_rope

    mode = vllm_config.compilation_config.mode
    if vllm_config.model_config.enforce_eager or mode == CompilationMode.NONE:
        return ASKED
    if mode is None and vllm_config.optimization_level == 0:
        return ASKED
    if mode == CompilationMode.STOCK_TORCH_COMPILE:
        return "mode STOCK_TORCH_COMPILE does not stop at the linear layers"
    if mode is None and not current_platform.is_cuda():
        return "without a GPU it is done only if a compilation mode is given"
    if has_dynamic_rope(vllm_config.model_config.hf_config):
        return "its rotary embedding depends on the longest request (rope_type dynamic)"
    return None


def _why_not_captured(vllm_config: Any) -> str | None:
    """The reason why no step is captured as one CUDA graph; None if those in which all requests decode are."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    from liger_convert.serving.settings import layouts, why_not_captured

    model = vllm_config.model_config
    if model.enforce_eager or vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return ASKED
    if not current_platform.is_cuda():
        return "only Nvidia's GPUs have CUDA graphs"
    if kernel_for("fused_step") is None:
        return "the Triton kernels are not in use"
    processes = vllm_config.parallel_config.tensor_parallel_size
    return why_not_captured(model.hf_config, layouts(model.hf_config, model.dtype, processes))


def _split(compilation: Any) -> None:
    """Makes vLLM split a compiled model at the op of the linearized layers, too, if it splits it at all."""
    from liger_convert.serving.settings import ATTEND

    if compilation.splitting_ops is None and not compilation.pass_config.fuse_attn_quant:
        # what vLLM takes where nothing is given
        compilation.splitting_ops = list(compilation._attention_ops)
        if not compilation.use_inductor_graph_partition:
            compilation.splitting_ops += KV_UPDATES
    if compilation.splitting_ops:
        compilation.splitting_ops.append(ATTEND)


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
