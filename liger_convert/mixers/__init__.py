"""The registry of mixers. Adding one is a file in this folder and a line in MIXERS."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from liger_convert.mixers.base import HeadDims, Mixer, MixerSpec
from liger_convert.mixers.control.forgetting import Forgetting
from liger_convert.mixers.control.window import Window
from liger_convert.mixers.delta.deltanet import DeltaNet
from liger_convert.mixers.delta.gated_deltanet import GatedDeltaNet
from liger_convert.mixers.delta.rwkv7 import RWKV7
from liger_convert.mixers.delta.titans import Titans
from liger_convert.mixers.delta.ttt import TTT
from liger_convert.mixers.linear.decaying_fast_weights import DecayingFastWeights
from liger_convert.mixers.linear.gated_retention import GatedRetention
from liger_convert.mixers.linear.gated_rfa import GatedRFA
from liger_convert.mixers.linear.gateloop import GateLoop
from liger_convert.mixers.linear.gla import GLA
from liger_convert.mixers.linear.hgrn2 import HGRN2
from liger_convert.mixers.linear.liger_paper import LigerPaper
from liger_convert.mixers.linear.lightning import Lightning
from liger_convert.mixers.linear.linear_attention import LinearAttention
from liger_convert.mixers.linear.mlstm import MLSTM
from liger_convert.mixers.linear.rebased import Rebased
from liger_convert.mixers.linear.retnet import RetNet
from liger_convert.mixers.linear.rwkv6 import RWKV6
from liger_convert.mixers.routed.mom import MoM
from liger_convert.mixers.slots.abc import ABC
from liger_convert.mixers.slots.gsa import GSA
from liger_convert.mixers.ssm.mamba import Mamba
from liger_convert.mixers.ssm.mamba2 import Mamba2
from liger_convert.mixers.ssm.s4 import S4
from liger_convert.utils.errors import BadInput, did_you_mean

MIXERS: dict[str, type[Mixer]] = {
    GLA.name: GLA,
    LigerPaper.name: LigerPaper,
    LinearAttention.name: LinearAttention,
    Rebased.name: Rebased,
    GatedRFA.name: GatedRFA,
    Lightning.name: Lightning,
    RetNet.name: RetNet,
    GatedRetention.name: GatedRetention,
    GateLoop.name: GateLoop,
    HGRN2.name: HGRN2,
    Mamba2.name: Mamba2,
    MLSTM.name: MLSTM,
    RWKV6.name: RWKV6,
    DecayingFastWeights.name: DecayingFastWeights,
    DeltaNet.name: DeltaNet,
    GatedDeltaNet.name: GatedDeltaNet,
    RWKV7.name: RWKV7,
    TTT.name: TTT,
    Titans.name: Titans,
    GSA.name: GSA,
    ABC.name: ABC,
    Mamba.name: Mamba,
    S4.name: S4,
    MoM.name: MoM,
    Window.name: Window,
    Forgetting.name: Forgetting,
}

SOFTMAX = "softmax"


def resolve_spec(spec: dict[str, Any], where: str = "mixer") -> dict[str, Any]:
    """`spec` with every default filled in. `where` is its path in the recipe, for the sentence of a BadInput."""
    options = dict(spec)
    kind = options.pop("type", GLA.name)
    if kind not in MIXERS:
        raise BadInput(
            f"{where}.type: mixer {kind!r} is unknown{did_you_mean(kind, MIXERS)}; known: {', '.join(MIXERS)}"
        )
    cls: Any = MIXERS[kind].Spec
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


def build_mixer(spec: dict[str, Any], dims: HeadDims) -> Mixer:
    """The mixer module of one layer from its resolved spec."""
    return MIXERS[spec["type"]](make_spec(spec), dims)


def make_spec(spec: dict[str, Any]) -> MixerSpec:
    """The spec dataclass of a resolved spec."""
    cls: Any = MIXERS[spec["type"]].Spec
    return cls(**{name: value for name, value in spec.items() if name != "type"})


def _checked(kind: Any, value: Any, where: str) -> Any:
    """`value` as the field's type (an int counts as a float; a bool is no number), or BadInput."""
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
