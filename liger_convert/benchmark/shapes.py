"""The sizes of well-known models, for models with random weights when only time and memory matter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_convert.config.names import MAIN
from liger_convert.utils.errors import BadInput, did_you_mean, nearest

if TYPE_CHECKING:
    import torch


def _decoder(
    layers: int,
    hidden: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    theta: float,
    tied: bool = True,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "max_position_embeddings": 1 << 20,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _decoder(30, 576, 1536, 9, 3, 49152, 1e5),
    "smollm2-360m": _decoder(32, 960, 2560, 15, 5, 49152, 1e5),
    "smollm2-1.7b": _decoder(24, 2048, 8192, 32, 32, 49152, 1.3e5),
    "llama-3.2-1b": _decoder(16, 2048, 8192, 32, 8, 128256, 5e5),
    "llama-3.2-3b": _decoder(28, 3072, 8192, 24, 8, 128256, 5e5),
    "llama-3-8b": _decoder(32, 4096, 14336, 32, 8, 128256, 5e5, tied=False),
    "mistral-7b": _decoder(32, 4096, 14336, 32, 8, 32768, 1e6, tied=False, model_type="mistral", sliding_window=None),
}


def is_shape(source: str) -> bool:
    """Whether `source` is the name of a shape, and not of a file or folder. Raises BadInput if it resembles the name of
    a shape."""
    if Path(source).exists() or "/" in source:
        return False
    if source not in SHAPES and nearest(source, SHAPES):
        known = ", ".join(SHAPES)
        raise BadInput(
            f"{source}: is neither a model nor a shape{did_you_mean(source, SHAPES)}; the known shapes are {known}"
        )
    return source in SHAPES


def random_model(shape: str, mixer: str | None, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of that shape with random weights, created on `device`, with its mixers in float32.

    Every layer is linearized with `mixer`; None leaves the base. Memories have more weight relative to their windows
    than at the start of training, so that the check can see them in bfloat16, too. Raises BadInput for an unknown
    mixer.
    """
    # imported here, because shell completion reads the names of shapes without torch
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from liger_convert.mixers import resolve_spec
    from liger_convert.mixers.base import Mixer
    from liger_convert.model import linearized_config
    from liger_convert.model.configuration import FORMAT

    values = dict(SHAPES[shape])
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    if mixer is not None:
        spec = resolve_spec({"type": mixer})
        layers = [MAIN] * config.num_hidden_layers
        config = linearized_config(config, {"format": FORMAT, "mixers": {MAIN: spec}, "layers": layers})
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        if isinstance(module, Mixer):
            module.float().reset_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".log_share_H", ".mix_H")):
                parameter.fill_(4.0 if name.endswith("share_H") else 0.0)
    return model.eval()
