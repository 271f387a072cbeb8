"""What pydantic finds wrong with a recipe, as one sentence with the path of the field and the nearest right name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from liger_convert.utils.errors import nearest

LONGEST = 200  # characters of a value that a sentence repeats


def unknown(name: object, names: Iterable[str], what: str) -> str:
    """`'txt' is not a source; did you mean 'text'?`, or the list of what there is."""
    names = list(names)
    near = nearest(name, names)
    there = f"use one of {', '.join(names)}" if names else "there is none"
    return f"{name!r} is not a {what}; " + (f"did you mean {near!r}?" if near else there)


def sentence(error: ValidationError, model: type[BaseModel], data: Any) -> str:
    """The most telling error, as `path: what is wrong`. A wrong key comes first: it explains missing ones."""
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    located = [_locate(e, model, data) for e in errors]
    path, models = located[0]
    more = len({path for path, _ in located}) - 1  # the members of a union complain about one path each
    return (
        (f"{path}: " if path else "")
        + _explain(errors[0], models, model)
        + (f" (and {more} more problem{'s' * (more > 1)})" if more else "")
    )


def _explain(error: Any, models: list[type[BaseModel]], top: type[BaseModel]) -> str:
    kind, ctx, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "conflict":
        return str(ctx["why"])
    if kind == "missing":
        return "this field is required and missing"
    if kind == "union_tag_not_found":
        return f"the field {ctx['discriminator']} is required and missing"
    if kind == "union_tag_invalid":
        name = ctx["discriminator"].strip("'")
        return unknown(value[name], _quoted(ctx["expected_tags"]), name)
    if kind == "literal_error" and _quoted(ctx["expected"]):
        return unknown(value, _quoted(ctx["expected"]), "choice")
    if kind == "extra_forbidden":
        return _wrong_key(error["loc"], models, top)
    if kind == "model_type" and ctx["class_name"] == "WrittenMixer" and isinstance(value, str):
        return f"should be a mapping of fields, such as {{type: {value}}}, not {_yaml(value)}"
    what = _PLAIN.get(kind) or error["msg"].removeprefix("Input ").removeprefix("Value ")
    return f"{what[0].lower()}{what[1:]}" + ("" if isinstance(value, dict | list) else f", not {_yaml(value)}")


_PLAIN = {
    "model_type": "should be a mapping of fields",
    "model_attributes_type": "should be a mapping of fields",
    "dict_type": "should be a mapping of names",
    "list_type": "should be a list",
    "string_type": "should be a string",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "bool_type": "should be true or false",
}


def _yaml(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _wrong_key(loc: tuple[int | str, ...], models: list[type[BaseModel]], top: type[BaseModel]) -> str:
    key = str(loc[-1])
    elsewhere = [path for path, name in _all_fields([top]) if name == key]
    # prefers a field nearby, and one that all kinds have to one of a single kind
    elsewhere.sort(key=lambda path: (not path.startswith(str(loc[0])), " of " in path))
    if elsewhere:
        _, other, kind = elsewhere[0].partition(" of source ")
        whole = f"; write a source of another kind as a whole: {loc[0]}.{loc[1]}={{source: {kind}, …}}" if other else ""
        return f"this key belongs to {elsewhere[0]}, not here{whole}"
    names = [name for model in models for name in model.model_fields]
    near = nearest(key, names)
    return "unknown key; " + (f"did you mean {near!r}?" if near else f"the keys here are {', '.join(names)}")


def _quoted(text: str) -> list[str]:
    """The names in pydantic's `'a', 'b' or 'c'`."""
    return text.split("'")[1::2]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation such as `dict[str, A | B] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _tag(model: type[BaseModel]) -> str:
    """` of kind align`: which member of a union a model is, from its one-valued Literal field."""
    literals = {name: get_args(field.annotation) for name, field in model.model_fields.items()}
    return "".join(f" of {name} {v[0]}" for name, v in literals.items() if len(v) == 1 and isinstance(v[0], str))


def _all_fields(models: list[type[BaseModel]], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, name) of every field of the schema, the shallow ones first; an item of a list reads `stages[…]`."""
    for model in models:
        for name in model.model_fields:
            shared = all(name in other.model_fields for other in models)
            yield prefix + name + ("" if shared else _tag(model)), name
    for model in models:
        for name, field in model.model_fields.items():
            inside = get_origin(field.annotation)
            below = "[…]" if inside is list else ".NAME" if inside is dict else ""
            yield from _all_fields(_models(field.annotation), f"{prefix}{name}{below}.")


def _locate(error: Any, top: type[BaseModel], data: Any) -> tuple[str, list[type[BaseModel]]]:
    """The path as the recipe's author writes it, and the models whose fields are allowed at its last key.

    pydantic puts the tags of unions into its locations; what is neither in the data nor a missing field is such a tag.
    """
    path, models = "", [top]
    for i, part in enumerate(error["loc"]):
        last = i == len(error["loc"]) - 1
        inside = isinstance(data, list) if isinstance(part, int) else isinstance(data, dict) and part in data
        if not inside and not (last and error["type"] == "missing"):
            models = [m for m in models if _tag(m).endswith(f" {part}")] or models
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
        if inside:
            data = data[part]
        if not last:
            fields = [m.model_fields[part] for m in models if part in m.model_fields]
            models = [child for field in fields for child in _models(field.annotation)] or models
    ctx = error.get("ctx", {})
    at = ctx["discriminator"].strip("'") if error["type"] == "union_tag_invalid" else ctx.get("at", "")
    return f"{path}.{at}".strip("."), models
