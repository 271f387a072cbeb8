"""Classification heads of linearized models: the family's own classes on the linearized backbone."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

HEADS: dict[str, tuple[Any, Any]] = {
    "SequenceClassification": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "TokenClassification": (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    "QuestionAnswering": (AutoModelForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING),
}


class NoHead:
    """Stands in an Auto class for a head that a family lacks: its error says so, instead of listing all families."""

    config_class: Any
    why: str

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(cls.why)

    _from_config = from_pretrained


def head_classes(model_type: str, config: Any, mixin: type, common: dict[str, Any]) -> dict[str, type]:
    """The classes with a head of a linearized family, by the names of their Auto classes, with which they register.

    model_type: the base's. config: the linearized config class. mixin: what every linearized class inherits first.
    common: attributes of every generated class. A family without a head has no entry; its Auto class refuses then.
    """
    made = {}
    for head, (auto, mapping) in HEADS.items():
        base = mapping.get(CONFIG_MAPPING[model_type], None)
        if base is None:
            why = f"transformers has no {head} head for {model_type}, so a linearized {model_type} has none either"
            auto.register(config, type(f"No{head}", (NoHead,), {"config_class": config, "why": why}), exist_ok=True)
            continue
        # the family may call its backbone by an older name here, under which no checkpoint of ours has weights
        attributes = {**common, "base_model_prefix": "model"}
        made[auto.__name__] = type(f"Linearized{base.__name__}", (mixin, base), attributes)
        auto.register(config, made[auto.__name__], exist_ok=True)
    return made
