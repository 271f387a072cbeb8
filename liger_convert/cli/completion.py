"""Shell completion for the names of recipes, suites, mixers and shapes. A key press should not wait for torch, so
nothing that is imported here needs it."""

from __future__ import annotations


def recipes(incomplete: str) -> list[str]:
    """The shipped recipes whose names begin with `incomplete`."""
    return _shipped("recipes", incomplete)


def suites(incomplete: str) -> list[str]:
    """The shipped suites whose names begin with `incomplete`."""
    return _shipped("suites", incomplete)


def mixers(incomplete: str) -> list[str]:
    """The built-in mixers whose names begin with `incomplete`."""
    from liger_convert.mixers.registry import BUILT_IN

    return sorted(name for name in BUILT_IN if name.startswith(incomplete))


def shapes(incomplete: str) -> list[str]:
    """The shapes whose names begin with `incomplete`."""
    from liger_convert.benchmark.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def _shipped(kind: str, incomplete: str) -> list[str]:
    from liger_convert.config.resources import names

    return [name for name in names(kind) if name.startswith(incomplete)]
