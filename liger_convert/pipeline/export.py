"""A linearized checkpoint to a folder that anyone loads: the weights, and the code that runs them.

The code is this package's own, see `shipped_code`; with the package installed, none of it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from liger_convert.io.checkpoint import copy_companions, load_config, locate_base
from liger_convert.io.checksums import write_sums
from liger_convert.io.files import atomic_dir
from liger_convert.model import HEAD_CLASSES, linearized_classes
from liger_convert.model.families import PREFIX
from liger_convert.model.loading import check_folder
from liger_convert.model.shards import copied_shards, write_shards
from liger_convert.pipeline.card import HUB_ID, cached_folder, write_card
from liger_convert.pipeline.shipped_code import ENTRY_FILE, code_files, used_mixers
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report


def export_model(
    model_dir: Path | str,
    out: Path | str,
    *,
    dtype: str = "auto",
    name: str | None = None,
    base: str | None = None,
    base_dir: Path | None = None,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Writes the linearized checkpoint `model_dir` and the code that runs it to the new folder `out`.

    name: what the model card calls it; a hub id (org/name) is also where the card loads it from, else that is the name
    of `out`. base: what it was made from, as recipes name it. base_dir: that base's folder, if it is not `base` itself.
    Raises BadInput when `model_dir` is no linearized checkpoint or is damaged, `out` exists, or a mixer comes from a
    package whose code cannot be carried along.
    """
    model_dir = Path(model_dir)
    config = load_config(model_dir)
    if not config.model_type.startswith(PREFIX):
        raise BadInput(
            f"{model_dir}: holds a {config.model_type} model; export takes what `linearize convert` or `train` made"
        )
    checkpoint = check_folder(model_dir)
    code = code_files(used_mixers(config.linearization))
    model_type = config.model_type.removeprefix(PREFIX)
    classes = dict(zip(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), linearized_classes(model_type)))
    hub_base = base if base is not None and locate_base(base) is None else None
    if base is not None and base_dir is None:
        base_dir = locate_base(base) or cached_folder(base)
    with atomic_dir(out) as folder:
        total = write_shards(copied_shards(checkpoint, dtype), folder, progress)
        if dtype != "auto":
            config.dtype = getattr(torch, dtype)
        config.use_cache = True  # training leaves it off
        config.architectures = [classes["AutoModelForCausalLM"].__name__]
        config.auto_map = {
            auto: f"{ENTRY_FILE}.{cls.__name__}" for auto, cls in (classes | HEAD_CLASSES[model_type]).items()
        }
        config.save_pretrained(folder)
        copy_companions(model_dir, folder)
        for file, text in code.items():
            (folder / file).write_text(text, encoding="utf-8")
        place = Path(out).resolve().name
        title, load_from = name or place, name if name and HUB_ID.fullmatch(name) else place
        write_card(folder, config, title, load_from, hub_base=hub_base, base_dir=base_dir)
        write_sums(folder)
    return {"bytes": total, "dtype": str(config.dtype).removeprefix("torch.")}
