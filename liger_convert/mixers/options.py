"""Mixer options: validation, defaults, and construction of the mixer.

Options are checked against the types in a mixer's Spec, without a library for it, because exports contain this code.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

from liger_convert.mixers.registry import DEFAULT, find_mixer
from liger_convert.utils.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from liger_convert.mixers.base import HeadDims, Mixer, MixerSpec


def resolve_spec(spec: dict[str, Any], where: str = "mixer") -> dict[str, Any]:
    """Fills in the default of every option that `spec`, a mixer's type and options, leaves out.

    Raises BadInput, with a sentence that begins with `where`, for an unknown type or option and for a value that is not
    allowed.
    """
    options = dict(spec)
    kind = options.pop("type", DEFAULT)
    cls: Any = find_mixer(kind, where).Spec
    types = typing.get_type_hints(cls)
    for name, value in options.items():
        if name not in types:
            hint = did_you_mean(name, types)
            raise BadInput(f"{where}.{name}: mixer {kind} has no such option{hint}; it has {', '.join(types)}")
        options[name] = _checked(types[name], value, f"{where}.{name}")
    resolved = cls(**options)
    if problem := resolved.problem():
        raise BadInput(f"{where}.{problem}")
    return {"type": kind, **dataclasses.asdict(resolved)}


def make_spec(spec: dict[str, Any]) -> MixerSpec:
    """The Spec object of a resolved spec. Raises BadInput for an unknown type."""
    return find_mixer(spec["type"]).Spec(**{name: value for name, value in spec.items() if name != "type"})


def build_mixer(spec: dict[str, Any], dims: HeadDims) -> Mixer:
    """The mixer module of one layer, built from its resolved spec. Raises BadInput for an unknown type."""
    return find_mixer(spec["type"])(make_spec(spec), dims)


def _checked(kind: Any, value: Any, where: str) -> Any:
    """`value` as the field's type. An int is accepted as a float, but a bool is not a number. Raises BadInput."""
    if typing.get_origin(kind) is typing.Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            hint = did_you_mean(value, allowed)
            raise BadInput(f"{where}: {value!r} is not allowed{hint}; use one of {', '.join(allowed)}")
        return value
    kind = typing.get_origin(kind) or kind
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadInput(f"{where}: {value!r} is not a value of type {kind.__name__}")
    return value
