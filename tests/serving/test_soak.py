"""Clients who ask in all ways at once leave nothing behind; `tests/support/soak.py` does the same for minutes."""

from __future__ import annotations

from pathlib import Path

from reminding import trained_export
from running import running_server
from soak import OPTIONS, soak

SECONDS = 30


def test_a_soak_leaves_no_block_in_use(tmp_path: Path) -> None:
    """What clients ask for while others hang up, are thrown out or ask in vain is right, which `soak` checks."""
    export = trained_export("hybrid", "gla")
    with running_server(export, tmp_path, *OPTIONS) as server:
        found = soak(server, export, SECONDS)
    print(found)
    assert found.in_use[0] > 0.9  # blocks were scarce, and the metric moves
    assert found.in_use[1] == 0
    assert found.preempted > 0
    assert found.spared > 0
    assert len(found.counts) == 5, "one way to ask was never taken"
