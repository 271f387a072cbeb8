"""Fields of a recipe that once had another name: by section, the old name and the new one.

A recipe with an old name is refused with a sentence that names the new one (`fields.Strict`). The options of mixers
also stand in the config.json of models; there they are still read (`current`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

RENAMED: dict[str, dict[str, str]] = {
    "mixer": {"join": "combine"},
    "stages": {
        "joined": "concat_documents",
        "shorter": "mixed_seq_lens",
        "repeats": "copy_fraction",
        "rates": "learning_rates",
        "clip": "max_grad_norm",
        "warmup": "warmup_ratio",
    },
    "mixed_seq_lens": {"share": "fraction"},
    "adapt": {"adapters": "trained", "align_lora_rate": "lora_rate"},
}


def old_name(section: str, fields: Iterable[str]) -> tuple[str, str] | None:
    """The first of `fields` that has another name now, and what to say of it; None where there is none."""
    names = RENAMED.get(section, {})
    return next(((field, f"is called {names[field]} now") for field in fields if field in names), None)


def current(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with every old name replaced by the new one."""
    names = RENAMED.get(section, {})
    return {names.get(name, name): value for name, value in values.items()}
