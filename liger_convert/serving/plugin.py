"""The vLLM plugin, an entry point in `vllm.general_plugins`; vLLM calls `register` in every process."""

from __future__ import annotations

from typing import Any


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
            vllm_config.model_config.enforce_eager = True

    for model_type, (_, _, model) in CLASSES.items():
        served = "ServedMoEForCausalLM" if FAMILIES[model_type].moe else "ServedForCausalLM"
        ModelRegistry.register_model(model.__name__, f"liger_convert.serving.model:{served}")
        MODELS_CONFIG_MAP[model.__name__] = LinearizedConfig
