"""How a pass over the states is cut, so that a long sequence of few heads fills a GPU.

All parts run from a state of zeros, each hands its last state on to the next, and all run again.
"""

from __future__ import annotations

PROGRAMS = 264  # in a pass over the states, at which a GPU is full enough: two on each of the 132 processors of an H200
STEPS = 8  # of the loop over chunks (and heads, backward) that a part has at least


def cut(chunks: int, steps: int, programs: int) -> tuple[int, int]:
    """The chunks of a part, and how many parts there are, of a pass of so many chunks, steps and programs."""
    parts = min(chunks, steps // STEPS, PROGRAMS // programs)
    part = -(-chunks // parts) if parts >= 4 else chunks  # every part is run twice
    return part, -(-chunks // part)
