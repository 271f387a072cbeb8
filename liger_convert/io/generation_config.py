"""Reads a model's generation_config.json, which transformers needs to be sound wherever it loads the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_convert.utils.errors import BadInput, first_line

FILE = "generation_config.json"


def read(folder: Path, vocabulary: int | None) -> Any:
    """The GenerationConfig in `folder`, of a model with `vocabulary` embeddings (None: unknown); None if it has none.

    Raises BadInput for what transformers cannot read, and for an end-of-text token that there is not.
    """
    from transformers import GenerationConfig

    path = folder / FILE
    if not path.exists():
        return None
    try:
        given = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # whatever a broken file makes the library raise
        raise BadInput(f"{path}: transformers cannot read it: {reason(error)}") from None
    ends = given.eos_token_id if isinstance(given.eos_token_id, list) else [given.eos_token_id]
    for end in ends:
        if end is not None and not (type(end) is int and end >= 0 and (vocabulary is None or end < vocabulary)):
            tokens = "the tokens" if vocabulary is None else f"the {vocabulary} tokens"
            raise BadInput(f"{path}: eos_token_id is {end!r}; it should be the id of one of {tokens}")
    return given


def reason(error: BaseException) -> str:
    """The first line of an error, with the list that transformers writes below it."""
    points = [line.strip("- ") for line in str(error).splitlines() if line.startswith("- ")]
    return " ".join([first_line(error), *points])
