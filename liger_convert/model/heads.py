"""Task heads of linearized models (classification, question answering): the family's classes on our backbone."""

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
    """Registered with an Auto class for a head that the family lacks, so that the error names the missing head."""

    config_class: Any
    why: str

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(cls.why)

    _from_config = from_pretrained


def head_classes(model_type: str, config: Any, mixin: type, common: dict[str, Any]) -> dict[str, type]:
    """Generates the head classes of a linearized family and registers them; returns them by Auto class name.

    model_type: the base's. config: the linearized config class. mixin: the first base of every linearized class.
    common: attributes of every generated class. Heads that the family lacks are left out; the Auto class then raises
    ValueError (see NoHead).
    """
    made = {}
    for head, (auto, mapping) in HEADS.items():
        base = mapping.get(CONFIG_MAPPING[model_type], None)
        if base is None:
            why = f"transformers has no {head} head for {model_type}, so a linearized {model_type} has none either"
            auto.register(config, type(f"No{head}", (NoHead,), {"config_class": config, "why": why}), exist_ok=True)
            continue
        # the family may use an older prefix for its backbone here; our checkpoints always use `model`
        attributes = {**common, "base_model_prefix": "model"}
        made[auto.__name__] = type(f"Linearized{base.__name__}", (mixin, base), attributes)
        auto.register(config, made[auto.__name__], exist_ok=True)
    return made
