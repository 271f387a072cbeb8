"""The configs of linearized models: the family's config under a new model_type, plus `linearization`."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_convert.config.names import SOFTMAX
from liger_convert.config.renamed import current
from liger_convert.model.families import FAMILIES, PREFIX, family_of

FORMAT = 2
BEFORE = 1  # the previous format, with other names for some options; converted on load by `config.renamed`


def _config_class(model_type: str) -> type:
    base: Any = CONFIG_MAPPING[model_type]

    def post_init(self: Any, **kwargs: Any) -> None:
        self.linearization = _current(self.linearization)
        base.__post_init__(self, **kwargs)

    return type(
        f"Linearized{base.__name__}",
        (base,),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} with `linearization`: the mixers by name, and the mixer of each layer.",
            "__annotations__": {"linearization": dict | None},
            "model_type": PREFIX + model_type,
            "linearization": None,
            "__post_init__": post_init,
        },
    )


def _current(linearization: Any) -> Any:
    """Converts a linearization from the previous format to the current one; returns any other unchanged."""
    if not isinstance(linearization, dict) or linearization.get("format") != BEFORE:
        return linearization
    mixers = {name: current("mixer", spec) for name, spec in linearization["mixers"].items()}
    return linearization | {"format": FORMAT, "mixers": mixers}


CONFIGS: dict[str, type] = {model_type: _config_class(model_type) for model_type in FAMILIES}
globals().update({cls.__name__: cls for cls in CONFIGS.values()})
for _cls in CONFIGS.values():
    AutoConfig.register(_cls.model_type, _cls, exist_ok=True)  # type: ignore[attr-defined]


def linearized_config(base_config: Any, linearization: dict[str, Any]) -> Any:
    """The config of the linearized model for `base_config`. linearization: as stored in config.json."""
    values = base_config.to_dict()
    for name in ("model_type", "architectures", "auto_map", "linearization"):
        values.pop(name, None)
    return CONFIGS[family_of(base_config).model_type](**values, linearization=linearization)


def linear_layers(config: Any) -> list[int]:
    """The indices of the linearized layers."""
    return [i for i, mixer in enumerate(config.linearization["layers"]) if mixer != SOFTMAX]
