"""Reads a model's generation_config.json, which transformers needs to be sound wherever it loads the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from liger_convert.io.files import read_json
from liger_convert.utils.errors import BadInput, first_line
from liger_convert.utils.progress import console

FILE = "generation_config.json"
# They ask for a cache of another kind, or for decoding that takes tokens back. `generate` of a linearized model refuses
# them: its cache is constant in size already, and its state cannot be rolled back.
REFUSED = ("cache_implementation", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def read(folder: Path, vocabulary: int | None) -> Any:
    """The GenerationConfig in `folder`, of a model with `vocabulary` embeddings (None: unknown); None if it has none.
    What a linearized model refuses is left out of it.

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
    for name in REFUSED:
        setattr(given, name, None)
    return given


def leave_out_refused(folder: Path) -> None:
    """Removes from the file in `folder`, if there is one, what a linearized model refuses, and says so on stderr."""
    path = folder / FILE
    written = read_json(path) if path.exists() else {}
    harmless = (None, False, "dynamic", "hybrid")  # transformers itself turns "hybrid" into "dynamic"
    left_out = [name for name in REFUSED if written.get(name) not in harmless]
    if not left_out:
        return
    path.write_text(json.dumps({name: x for name, x in written.items() if name not in left_out}, indent=2) + "\n")
    fields = ", ".join(f"{name}: {json.dumps(written[name])}" for name in left_out)
    what = f"warning: {FILE}: {fields} is left out: a linearized model has a cache of its own and takes no token back"
    console.print(what, markup=False, soft_wrap=True)


def reason(error: BaseException) -> str:
    """The first line of an error, with the list that transformers writes below it."""
    points = [line.strip("- ") for line in str(error).splitlines() if line.startswith("- ")]
    return " ".join([first_line(error), *points])
