"""Makes docs/recipes.md: every field of a recipe, from the schema in liger_convert/config.

A field is described by `Field(description=…)`, or in the docstring of its class by a paragraph or a line
`name: what it is.` A continued line is indented or not; the next `name:` of a field ends it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from typing import Any

from page_parts import MADE, table_row, yaml_value
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from liger_convert.config.recipe import Recipe

INTRODUCTION = f"""\
# Recipes

{MADE}

A recipe is a YAML file that says what to convert, how to train it and how to measure it.
The shipped recipes are in `recipes/`; each begins with the command that runs it. The package has them, too:
a command takes `recipes/smollm2-135m-quick.yaml` or, in any folder, the name `smollm2-135m-quick`.
`--set FIELD=VALUE` changes one field from the command line, for example `--set stages[0].tokens=4e6`.
A field that is unknown, misspelled or out of bounds is refused with a message that names it.

The smallest recipe names a base and a mixer:

```yaml
version: 1
name: first
base: HuggingFaceTB/SmolLM2-135M-Instruct
mixer: {{type: gla, window: 64, sinks: 4}}
```

A mixer has more options than `type`, `window` and `sinks`: [Mixers](mixers.md) lists them."""


def recipes_page() -> str:
    """Every field of a recipe, class by class."""
    sections = ["\n".join(_section(model, places)) for model, places in recipe_models().items()]
    return "\n\n".join([INTRODUCTION, *sections]) + "\n"


def _section(model: type[BaseModel], places: list[str]) -> list[str]:
    """The lines on one class of a recipe. places: where in a recipe it may stand."""
    general = " ".join(filter(None, (_tag(model), _plain(_docs_of(model)[0]))))
    lines = [f"## {model.__name__}", *(["", textwrap.fill(general, 118)] if general else [])]
    if places:
        lines += ["", f"Used at {' and '.join(f'`{place}`' for place in places)}."]
    if parents := _parents(model):
        links = " and ".join(f"[{parent.__name__}](#{parent.__name__.lower()})" for parent in parents)
        lines += ["", f"It has the fields of {links}" + (", and:" if own_fields(model) else ".")]
    if own_fields(model):
        lines += ["", "| field | value | default | description |", "| --- | --- | --- | --- |"]
        lines += [_field_row(model, name, field) for name, field in own_fields(model).items()]
    return lines


def _field_row(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    value = ", ".join(filter(None, (_type_words(field.annotation), _bounds(field))))
    return table_row((f"`{name}`", value, _default(field), _plain(description(model, name))))


def recipe_models() -> dict[type[BaseModel], list[str]]:
    """Every model that a recipe is made of, the recipe first, and where in a recipe it may stand: `stages[0]`."""
    found: dict[type[BaseModel], list[str]] = {}

    def visit(annotation: Any, path: str) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation not in found:
                for parent in _parents(annotation):
                    visit(parent, "")
                found[annotation] = []
                for name, field in annotation.model_fields.items():
                    visit(field.annotation, f"{path}.{name}".strip(".") if path or annotation is Recipe else "")
            if path and path not in found[annotation]:
                found[annotation].append(path)
        inside = {list: "[0]", dict: ".NAME"}.get(typing.get_origin(annotation), "") if path else ""
        for part in typing.get_args(annotation):
            visit(part, path + inside)

    visit(Recipe, "")
    return found


def _parents(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models with fields that this one is derived from."""
    return [base for base in model.__bases__ if issubclass(base, BaseModel) and base.model_fields]


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields that a model writes down itself, but for those that only fix the value of an inherited one."""
    inherited = {name for parent in _parents(model) for name in parent.model_fields}
    return {
        name: field
        for name, field in model.model_fields.items()
        if name in model.__annotations__ and not (name in inherited and _is_tag(field))
    }


def _is_tag(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is typing.Literal and len(typing.get_args(field.annotation)) == 1


def _tag(model: type[BaseModel]) -> str:
    """`kind: align` of a model that such a field tells from its siblings; empty for others."""
    own = own_fields(model)
    tags = [name for name, field in model.model_fields.items() if name not in own and _is_tag(field)]
    return " ".join(f"`{name}: {model.model_fields[name].default}`." for name in tags)


def _docs_of(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """What a class's docstring says in general, and what it says of each field."""
    general: list[str] = []
    fields: dict[str, list[str]] = {}
    current = general
    for line in inspect.cleandoc(model.__dict__.get("__doc__") or "").splitlines():
        start = re.match(r"`?(\w+)`?:\s+(.*)", line.strip())
        if start and start[1] in model.model_fields:
            current = fields.setdefault(start[1], [])
            line = start[2]
        elif not line.strip():
            current = general
        current.append(line.strip())
    return " ".join(filter(None, general)), {name: " ".join(lines) for name, lines in fields.items()}


def description(model: type[BaseModel], name: str) -> str:
    """One field in words, by its own description or a docstring of its class or of one that it is made from."""
    field = model.model_fields[name]
    if field.description:
        return field.description
    for parent in model.__mro__:
        if issubclass(parent, BaseModel) and parent is not BaseModel and name in parent.model_fields:
            described = parent.model_fields[name].description or _docs_of(parent)[1].get(name)
            if described:
                return described
    return ""


def _bounds(field: FieldInfo) -> str:
    """`1 to 10`, of the validators and constraints of a field."""
    low = high = ""
    for part in _metadata(field.annotation, list(field.metadata)):
        check = getattr(part, "func", None)
        if check is not None and inspect.isfunction(check):
            limits = inspect.getclosurevars(check).nonlocals
            if {"low", "high"} <= set(limits):
                low, high = f"from {_number(limits['low'])}", f"to {_number(limits['high'])}"
        for sign, words in (("ge", "at least"), ("gt", "above")):
            if (limit := getattr(part, sign, None)) is not None:
                low = f"{words} {_number(limit)}"
        for sign, words in (("le", "at most"), ("lt", "below")):
            if (limit := getattr(part, sign, None)) is not None:
                high = f"{words} {_number(limit)}"
    return (" " if low.startswith("from") else " and ").join(filter(None, (low, high)))


def _number(value: float) -> str:
    """A bound as people write it: 0.001, 65,536, 1e12."""
    if value == 0 or 1e-3 <= abs(value) < 1e10:
        return f"{value:,.0f}" if value == int(value) else f"{value:g}"
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}")


def _metadata(annotation: Any, found: list[Any]) -> list[Any]:
    """All that stands in `Annotated[…]`, also below `… | None`; not below lists, whose bounds are of their items."""
    if typing.get_origin(annotation) is typing.Annotated:
        found += annotation.__metadata__
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            _metadata(part, found)
    return found


WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


def _type_words(annotation: Any) -> str:
    """A type as people say it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if origin is typing.Annotated:
        return _type_words(parts[0])
    if origin is typing.Literal:
        return " or ".join(f"`{yaml_value(part)}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        said = [_type_words(part) for part in parts if part is not type(None)]
        return (", or " if any(kind.startswith("list") for kind in said) else " or ").join(dict.fromkeys(said))
    if origin is list:
        item = _type_words(parts[0])
        return f"list of {item}s" if item in ("text", "whole number", "number") else f"list of {item}"
    if origin is dict:
        return f"names, each with {_type_words(parts[1])}"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{yaml_value(value)}`"


def _plain(text: str) -> str:
    """A docstring's text as a sentence of a page."""
    text = re.sub(r"\s+", " ", text).strip()
    return text[:1].upper() + text[1:] if text[:1].isalpha() else text


def missing_fields() -> list[str]:
    """Fields that no description and no docstring explains."""
    return [
        f"{model.__name__}.{name}"
        for model in recipe_models()
        for name in own_fields(model)
        if not description(model, name)
    ]
