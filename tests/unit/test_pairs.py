"""The selection that `make test` runs of all families, mixers and checks covers every pair."""

from __future__ import annotations

from itertools import product

import pytest
from pairs import is_quick

from liger_convert.mixers import MIXERS
from liger_convert.model.families import FAMILIES


@pytest.mark.parametrize("check", ["test_one", "test_two", "test_two[a-1]"])
def test_every_check_meets_every_family_and_every_mixer_once(check: str) -> None:
    quick = [(family, mixer) for family, mixer in product(FAMILIES, MIXERS) if is_quick(family, mixer, check)]
    assert {family for family, _ in quick} == set(FAMILIES)
    assert {mixer for _, mixer in quick} == set(MIXERS)
    assert len(quick) == max(len(FAMILIES), len(MIXERS)), "no more than it takes"


def test_checks_differ_in_the_families_of_a_mixer() -> None:
    families = {family for number in range(200) for family in FAMILIES if is_quick(family, "gla", f"test_{number}")}
    assert families == set(FAMILIES)
