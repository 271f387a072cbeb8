"""Which layers become linear: the forms that a recipe may write, and what each makes of every layer of a base."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from liger_convert.config.fields import Index, Strict, Tokens, between, refuse, whole
from liger_convert.config.names import LONG, MAIN, SOFTMAX
from liger_convert.utils.errors import BadInput, counted


def _count_or_fraction(value: Any) -> Any:
    if value is None or (type(value) in (int, float) and 0 < value < 1):
        return value
    if type(value) is float and value == 1:
        refuse("", "1.0 may mean one layer or all of them: give 1 for one layer")
    if type(value) not in (int, float) or value < 1 or value % 1:
        refuse("", f"should be a whole number of layers above 0, or a fraction of them between 0 and 1, not {value!r}")
    return int(value)


def _numbers_or_count(value: Any) -> Any:
    return value if isinstance(value, list) else _count_or_fraction(value)


class LongWindows(Strict):
    """Linear layers with a longer window than the others. Their cache still has a constant size."""

    layers: Annotated[list[Index] | int | float, BeforeValidator(_numbers_or_count)]
    """Numbers of these layers, counted from 0; they become linear, and `softmax_auto` chooses among the others. Or how
    many there are, or below 1, what fraction of the linear layers, rounded down; the run then measures which ones need
    it most."""
    window: Annotated[int, BeforeValidator(whole), between(1, 10**8)]
    """How many of the last tokens a query attends to exactly in these layers."""

    @property
    def undecided(self) -> bool:
        """Whether the run measures which layers they are."""
        return not isinstance(self.layers, list)

    @property
    def named(self) -> list[int]:
        """The layers that the recipe names."""
        return self.layers if isinstance(self.layers, list) else []

    def among(self, names: list[str]) -> list[str]:
        """`names`, what every layer becomes, with the name of the longer window in these layers. The first linear
        layers stand for those that are chosen later. Raises BadInput for layers that are not linear."""
        linear = [i for i, name in enumerate(names) if name == MAIN]
        if isinstance(self.layers, list):
            _check_numbers(self.layers, len(names), "layers.long_windows.layers")
            for i in self.layers:
                if i not in linear:
                    raise BadInput(f"layers.long_windows.layers: layer {i} stays softmax; name linear layers")
            chosen = self.layers
        else:
            count = int(self.layers) if self.layers >= 1 else int(self.layers * len(linear))
            chosen = linear[:count]
        if linear and len(chosen) >= len(linear):
            why = f"would be all {len(linear)} linear layers; set mixer.window instead"
            raise BadInput(f"layers.long_windows.layers: {why}")
        return [LONG if i in chosen else name for i, name in enumerate(names)]


class LayerChoice(Strict):
    """One choice of layers: exactly one of the first five fields."""

    softmax_every: Annotated[int, between(2, 10**4)] | None = None
    """The last layer of every group of this many stays softmax."""
    linear: Annotated[list[Index], Field(min_length=1)] | None = None
    """Numbers of the layers that become linear, counted from 0; the others stay softmax."""
    softmax: list[Index] | None = None
    """Numbers of the layers that stay softmax, counted from 0; the others become linear."""
    softmax_auto: Annotated[int | float | None, BeforeValidator(_count_or_fraction)] = None
    """How many layers stay softmax, or below 1, what fraction of them; the run measures which ones."""
    repeat: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of mixers, or `softmax`, repeated over the layers."""

    select: Literal["copy", "kl", "gates"] = "copy"
    """How `softmax_auto` chooses. `copy` measures the loss on a repeated text. `kl` measures the divergence from the
    base on text in which stretches are repeated. `gates` trains one gate per layer, all at once."""
    select_tokens: Tokens = 500_000
    """Tokens that `select: gates` trains on."""
    long_windows: LongWindows | None = None
    """Some of the linear layers with a longer window."""

    @model_validator(mode="after")
    def _one(self) -> LayerChoice:
        forms = self.softmax_every, self.linear, self.softmax, self.softmax_auto, self.repeat
        if sum(value is not None for value in forms) != 1:
            refuse("", "give exactly one of softmax_every, linear, softmax, softmax_auto and repeat")
        if self.softmax_auto is None and self.select != "copy":
            refuse("select", "nothing is left to choose, so give softmax_auto or drop it")
        if self.long_windows is not None and self.repeat is not None:
            refuse("long_windows", "`repeat` names the mixer of every layer, so write one with that window in `mixers`")
        return self

    def resolve(self, depth: int, names: Sequence[str], sliding: Collection[int] = ()) -> list[str]:
        """What each of `depth` layers becomes: a mixer's name, one of `names`, or softmax.

        `softmax_every: n` keeps the last of every n layers. Under `softmax_auto` the last layers stand for those that
        are chosen later. The layers `sliding` become linear only where `linear` names them. Raises BadInput at the
        form's own path for layers or names that are not there.
        """
        chosen = self._softmax_and_linear(depth, names, sliding)
        return chosen if self.long_windows is None else self.long_windows.among(chosen)

    def _softmax_and_linear(self, depth: int, names: Sequence[str], sliding: Collection[int]) -> list[str]:
        if self.linear is not None:
            _check_numbers(self.linear, depth, "layers.linear")
            return [MAIN if i in self.linear else SOFTMAX for i in range(depth)]
        if self.softmax is not None:
            _check_numbers(self.softmax, depth, "layers.softmax")
            return [SOFTMAX if i in self.softmax or i in sliding else MAIN for i in range(depth)]
        full = depth - len(sliding)
        if self.softmax_every is not None:
            chosen = [SOFTMAX if (i + 1) % self.softmax_every == 0 else MAIN for i in range(full)]
        elif self.softmax_auto is not None:
            if full == 1:
                only = "only one layer" + " without a window of its own" * bool(sliding)
                why = f"keeps at least one layer, but the base has {only}"
                raise BadInput(f"layers.softmax_auto: {why}; use layers: all")
            if self.softmax_auto >= full:
                which = f"{full} layers without a window of their own" if sliding else f"{full} layers"
                few = f"keep fewer than the base's {which}"
                raise BadInput(f"layers.softmax_auto: {self.softmax_auto} is too many; {few}")
            kept = int(self.softmax_auto) if self.softmax_auto >= 1 else max(1, int(self.softmax_auto * full))
            named = [] if self.long_windows is None else self.long_windows.named
            seeing_all = [i for i in range(depth) if i not in sliding]
            free = [i for i in seeing_all if i not in named]
            if kept > len(free):
                few = f"layers.long_windows.layers leaves {len(free)} to choose from"
                raise BadInput(f"layers.softmax_auto: {kept} is too many; {few}")
            chosen = [SOFTMAX if i in free[-kept:] else MAIN for i in seeing_all]
        else:
            assert self.repeat is not None
            _check_names(self.repeat, names, "layers.repeat")
            chosen = list(itertools.islice(itertools.cycle(self.repeat), full))
        return _among_sliding(chosen, depth, sliding)


def _tag(value: object) -> str:
    if isinstance(value, dict | LayerChoice):
        return "choice"
    return "names" if isinstance(value, list | tuple) else "pattern"


def _pattern(value: Any) -> str:
    if not isinstance(value, str):
        forms = "all, letters such as LLLN, a list of names, or a mapping such as {softmax_auto: 0.25}"
        refuse("", f"should be {forms}, not {value!r}")
    if not re.fullmatch("all|[LN]*L[LN]*", value):
        refuse("", f"{value!r} is not a pattern; use all, or letters such as LLLN (L becomes linear, N stays softmax)")
    return value


Layers = Annotated[
    Annotated[str, BeforeValidator(_pattern), Tag("pattern")]
    | Annotated[Annotated[list[str], Field(min_length=1)], Tag("names")]
    | Annotated[LayerChoice, Tag("choice")],
    Discriminator(_tag),
]


def resolve_layers(
    layers: str | list[str] | LayerChoice, depth: int, names: Sequence[str], sliding: Collection[int] = ()
) -> list[str]:
    """What each of `depth` layers becomes, a mixer's name or softmax, from any form that a recipe may give.

    Forms: `all`; letters such as `LLLN`, repeated to the depth; a list of names; a LayerChoice. The layers `sliding`
    have a window of the base's own beside others that see all tokens. Their cache does not grow, so they stay as they
    are unless they are named, and all other forms count the other layers alone. Raises BadInput at `layers` where they
    do not fit the base or leave nothing linear.
    """
    if isinstance(layers, LayerChoice):
        resolved = layers.resolve(depth, names, sliding)
    elif isinstance(layers, str):
        letters = itertools.cycle("L" if layers == "all" else layers)
        chosen = [MAIN if letter == "L" else SOFTMAX for letter in itertools.islice(letters, depth - len(sliding))]
        resolved = _among_sliding(chosen, depth, sliding)
    else:
        if len(layers) != depth:
            raise BadInput(f"layers: names {counted(len(layers), 'layer')}, but the base has {depth}")
        _check_names(layers, names, "layers")
        resolved = list(layers)
    if all(name == SOFTMAX for name in resolved):
        which = "the only layer" if depth == 1 else f"all {depth} layers"
        raise BadInput(f"layers: leaves {which} softmax, so there is nothing to linearize")
    return resolved


def _among_sliding(chosen: list[str], depth: int, sliding: Collection[int]) -> list[str]:
    """What each of `depth` layers becomes where those that are not `sliding` become what is `chosen`, in turn."""
    rest = iter(chosen)
    return [SOFTMAX if i in sliding else next(rest) for i in range(depth)]


def _check_names(written: Sequence[str], names: Sequence[str], where: str) -> None:
    for i, name in enumerate(written):
        if name not in (*names, SOFTMAX):
            raise BadInput(f"{where}[{i}]: {name!r} is not a mixer; use one of {', '.join([*names, SOFTMAX])}")


def _check_numbers(numbers: Sequence[int], depth: int, where: str) -> None:
    for number in numbers:
        if not 0 <= number < depth:
            raise BadInput(f"{where}: layer {number} does not exist; the base has layers 0 to {depth - 1}")
        if numbers.count(number) > 1:
            raise BadInput(f"{where}: layer {number} is named twice")
