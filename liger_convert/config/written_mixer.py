"""A mixer as a recipe writes it. What its options mean, and their defaults, the mixer says itself (`mixers`)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, model_validator

from liger_convert.config.fields import Strict, between, number, refuse, whole
from liger_convert.config.renamed import old_name

# Of a mixer's codes, slots, sinks, states, …: each takes memory in every layer, and the most in use are some hundred.
OPTION_SIZE = 1 << 16


class WrittenMixer(Strict):
    """A mixer's type and those of its options that differ from its defaults, see [Mixers](mixers.md)."""

    model_config = ConfigDict(extra="allow")
    section = "mixer"

    type: str
    """Name of the mixer, see `linearize mixers`."""
    window: Annotated[int, BeforeValidator(whole), between(0, 10**8)] | None = None
    """How many of the last tokens a query attends to exactly; 0 for all."""
    sinks: Annotated[int, between(0, OPTION_SIZE)] | None = None
    """How many of the first tokens of a text every query attends to exactly."""

    @model_validator(mode="after")
    def _bounded(self) -> WrittenMixer:
        _check_options(self.model_extra or {}, "")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Only what was written, ready for `mixers.resolve_spec`."""
        return self.model_dump(mode="json", exclude_unset=True)


def _check_options(options: dict[str, Any], path: str) -> None:
    """Refuses numbers out of bounds, also in options that are mixers themselves, and there old names as well."""
    if old := old_name(WrittenMixer.section, options):
        refuse(path + old[0], old[1])
    for name, value in options.items():
        if isinstance(value, dict):
            _check_options(value, f"{path}{name}.")
        elif isinstance(value, int | float) and not -OPTION_SIZE <= value <= OPTION_SIZE:
            refuse(f"{path}{name}", f"should be from {-OPTION_SIZE:,} to {OPTION_SIZE:,}, not {number(value)}")
