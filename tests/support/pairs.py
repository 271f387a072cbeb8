"""Which models a check runs on in `make test`: pairs over family x mixer x check instead of the whole product.

A check that takes the fixture `model` runs on every mixer and every family, each time with another of both (of the
fewer ones, some twice). Checks that take `every_model` run on all, so every family meets every mixer. `make test-all`
is the whole product.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from liger_convert.mixers import MIXERS
from liger_convert.model.families import FAMILIES

MODELS = [(family, mixer) for family in FAMILIES for mixer in MIXERS]


def is_quick(family: str, mixer: str, check: str) -> bool:
    """Whether `make test` runs `check`, a test's name with its other parameters, on this family and mixer.

    The answer depends on the three names alone, not on which other tests are run.
    """
    families, mixers, shift = list(FAMILIES), list(MIXERS), crc32(check.encode())
    turns = range(max(len(families), len(mixers)))
    return any((families[(i + shift) % len(families)], mixers[i % len(mixers)]) == (family, mixer) for i in turns)


def quick_pairs(check: str) -> list[Any]:
    """All models as parameters (family, mixer) of a test; those that `is_quick` leaves out of `check` are slow."""
    return [pytest.param(*model, marks=[] if is_quick(*model, check) else pytest.mark.slow) for model in MODELS]
