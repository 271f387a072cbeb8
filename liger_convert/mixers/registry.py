"""The mixer registry. A mixer registers itself, and its module is imported on first use.

Another package can add a mixer with an entry point of the group `liger_convert.mixers` that names its module or class:

    [project.entry-points."liger_convert.mixers"]
    mine = "my_package:MyMixer"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, TypeVar

from liger_convert.utils.errors import BadInput, did_you_mean, refusing

if TYPE_CHECKING:
    from liger_convert.mixers.base import Mixer

GROUP = "liger_convert.mixers"
BUILT_IN = {
    name: f"liger_convert.mixers.{module}"
    for name, module in {
        "gla": "linear.gla",
        "liger-paper": "linear.liger_paper",
        "liger-hgrn2": "linear.liger_hgrn2",
        "liger-gsa": "slots.liger_gsa",
        "linear-attention": "linear.linear_attention",
        "rebased": "linear.rebased",
        "gated-rfa": "linear.gated_rfa",
        "lightning": "linear.lightning",
        "retnet": "linear.retnet",
        "gated-retention": "linear.gated_retention",
        "gateloop": "linear.gateloop",
        "hgrn2": "linear.hgrn2",
        "mamba2": "ssm.mamba2",
        "mlstm": "linear.mlstm",
        "rwkv6": "linear.rwkv6",
        "decaying-fast-weights": "linear.decaying_fast_weights",
        "deltanet": "delta.deltanet",
        "gated-deltanet": "delta.gated_deltanet",
        "gated-deltanet-2": "delta.gated_deltanet2",
        "kda": "delta.kda",
        "rwkv7": "delta.rwkv7",
        "ttt": "delta.ttt",
        "titans": "delta.titans",
        "gsa": "slots.gsa",
        "abc": "slots.abc",
        "mamba": "ssm.mamba",
        "s4": "ssm.s4",
        "mom": "routed.mom",
        "window": "control.window",
        "forgetting": "control.forgetting",
    }.items()
}
DEFAULT = "gla"
ATTRIBUTES = ("Spec", "summary", "gate_rule", "recurrence")

AnyMixer = TypeVar("AnyMixer", bound="type[Mixer]")
_classes: dict[str, type[Mixer]] = {}


def register_mixer(name: str) -> Callable[[AnyMixer], AnyMixer]:
    """Registers the decorated class as the mixer `name`. Raises BadInput if another class already has that name, or if
    the class does not say what all mixers have to say."""

    def register(cls: AnyMixer) -> AnyMixer:
        if missing := [attribute for attribute in ATTRIBUTES if not hasattr(cls, attribute)]:
            raise BadInput(f"mixer {name!r}: {_place(cls)} lacks {' and '.join(missing)}; see docs/extending/mixer.md")
        taken = _classes.get(name)
        if taken is not None and _place(taken) != _place(cls):
            raise BadInput(f"mixer {name!r}: both {_place(taken)} and {_place(cls)} have this name; rename one")
        cls.name = name
        _classes[name] = cls
        return cls

    return register


class _Mixers(Mapping[str, "type[Mixer]"]):
    """All mixers by name, those of other packages last. A lookup imports the class.

    It raises KeyError for an unknown name, and BadInput if the mixer cannot be imported or if two mixers have this
    name.
    """

    def __getitem__(self, name: str) -> type[Mixer]:
        if name not in self:
            raise KeyError(name)
        return _load(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in BUILT_IN or name in _classes or name in _plugins())

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*BUILT_IN, *_plugins(), *_classes]))

    def __len__(self) -> int:
        return len(list(iter(self)))


MIXERS: Mapping[str, type[Mixer]] = _Mixers()


def find_mixer(name: object, where: str = "mixer") -> type[Mixer]:
    """The class of the mixer `name`. Raises BadInput, which names `where`, if it is unknown or not importable."""
    if not isinstance(name, str) or name not in MIXERS:
        known = f"known: {', '.join(MIXERS)}"
        raise BadInput(f"{where}.type: mixer {name!r} is unknown{did_you_mean(name, MIXERS)}; {known}")
    try:
        return MIXERS[name]
    except BadInput as error:
        raise BadInput(f"{where}.type: {error}") from error


@cache
def _plugins() -> dict[str, list[EntryPoint]]:
    """The entry points of other packages by name. A name has several if they point to different places."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {name: list(entries.values()) for name, entries in found.items()}


def _load(name: str) -> type[Mixer]:
    plugins = _plugins().get(name, [])
    ours = [BUILT_IN[name]] if name in BUILT_IN else []
    places = ours + [f"{entry.value} ({_package(entry)})" for entry in plugins]
    if len(places) > 1:
        raise BadInput(f"mixer {name!r}: {' and '.join(places)} all have this name; rename or uninstall one")
    if name not in _classes:
        if name in BUILT_IN:
            with refusing(f"mixer {name!r}: cannot be imported"):
                import_module(BUILT_IN[name])
        else:
            _load_plugin(name, plugins[0])
    return _classes[name]


def _load_plugin(name: str, entry: EntryPoint) -> None:
    from liger_convert.mixers.base import Mixer

    what = f"mixer {name!r} of the package {_package(entry)}"
    with refusing(f"{what}: {entry.value} cannot be imported"):
        made = entry.load()
    if isinstance(made, type) and issubclass(made, Mixer) and made not in _classes.values():
        register_mixer(name)(made)
    if name not in _classes:
        raise BadInput(f'{what}: {entry.value} is not a mixer of that name; put @register_mixer("{name}") on its class')


def _package(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else entry.dist.name


def _place(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
