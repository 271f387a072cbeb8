"""Splits a scan over the states into parts, so that a long sequence with few heads fills a GPU.

All parts first run from a zero state, then the states before each part are computed from the last ones, and all parts
run again from these.
"""

from __future__ import annotations

from gated_kernels.common.integers import next_power_of_2

PROGRAMS = 264  # of a scan, enough to fill a GPU: two for each of the 132 SMs of an H200
STEPS = 8  # least number of iterations of a part's loop over chunks (and, in the backward pass, heads)


def cut(chunks: int, steps: int, programs: int) -> tuple[int, int]:
    """The chunks per part, and the number of parts.

    chunks, steps: chunks of a sequence, and iterations of the loop over them. programs: how many one part takes.
    """
    parts = min(chunks, steps // STEPS, PROGRAMS // programs)
    part = -(-chunks // parts) if parts >= 4 else chunks  # fewer parts do not pay, as each runs twice
    return part, -(-chunks // part)


def held(part: int) -> int:
    """The power of two that holds the chunks of a part; at least 64, so that most lengths share a compiled kernel."""
    return max(64, next_power_of_2(part))
