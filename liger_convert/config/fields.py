"""What fields of a recipe are made of: sections, bounded numbers, names. Nothing here imports torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from liger_convert.config.renamed import old_name

NAME_LENGTH = 60  # characters, so that a step's folder can be called after a name on every file system


def whole(value: object) -> object:
    """A whole float as an int, since people write token counts as 1e6, which YAML reads as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refuse(at: str, why: str) -> NoReturn:
    """Raises a conflict between fields of the model under validation. at: the path, below that model, of the one to
    change."""
    raise PydanticCustomError("conflict", "{why}", {"at": at, "why": why})


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name) > NAME_LENGTH:
        rule = f"letters, digits, _, - and ., at most {NAME_LENGTH}, the first a letter, digit or _"
        refuse("", f"{name[:NAME_LENGTH]!r} cannot be a name; use {rule}")
    return name


def plain_name(text: str) -> str:
    """`text`, such as a folder's name, as a name that a recipe takes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:NAME_LENGTH] or "model"


# of a recipe, a source or a mixer: folders of a run are called after some of them
Name = Annotated[str, AfterValidator(_plain_name)]


def number(value: float) -> str:
    return f"{value:,}" if value == 0 or 1e-3 <= abs(value) < 1e15 else f"{value:g}"


def between(low: float, high: float) -> AfterValidator:
    """Bounds of a number, both allowed, with a sentence that names them."""

    def check(value: float) -> float:
        if not low <= value <= high:
            refuse("", f"should be from {number(low)} to {number(high)}, not {number(value)}")
        return value

    return AfterValidator(check)


# The upper bounds stand well above all that is trained, so that a typo can be told from a large number: models are
# trained on up to 4e13 tokens, in contexts of up to 1e7, and batches of some thousand rows. The plan says what a
# machine has no room for.
Count = Annotated[int, BeforeValidator(whole), between(1, 10**9)]
Index = Annotated[int, between(0, 10**9)]
Tokens = Annotated[int, BeforeValidator(whole), between(1, 10**15)]
Length = Annotated[int, BeforeValidator(whole), between(2, 10**8)]  # of a row, a document, a window
Rows = Annotated[int, BeforeValidator(whole), between(1, 10**5)]  # that are worked on at once
Processes = Annotated[int, BeforeValidator(whole), between(1, 1024)]
Seed = Annotated[int, between(0, 2**31 - 1)]  # a stage adds its number; numpy takes less than 2**32
Rate = Annotated[float, between(1e-12, 10)]  # Adam's steps are as large as the rate, weights some hundredths
Temperature = Annotated[float, between(1e-3, 1e3)]  # of softmax
Weight = Annotated[float, between(0, 1e6)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    """A section of a recipe: its own fields and no others, of their own types, never changed.

    section: its name in `renamed.RENAMED`; a field that stands there as an old name is refused with the new one.
    The text below a field describes it, here and in docs/recipes.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    section: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _no_old_names(cls, data: Any) -> Any:
        if isinstance(data, dict) and (old := old_name(cls.section, data)):
            refuse(*old)
        return data
