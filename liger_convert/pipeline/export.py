"""A linearized checkpoint to a folder that anyone loads: the weights, and beside them the code that runs them.

The code is this package's own model, mixer and op files, flattened into one folder because that is what transformers
loads remote code from; only their import lines change. With the package installed, none of it is needed.
"""

from __future__ import annotations

import importlib.util
import re
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
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report

ENTRY = "liger_convert.model.modeling"
ENTRY_FILE = "modeling_linearized"
INTERNAL_IMPORT = re.compile(r"^(\s*from )((?:liger_convert|gated_kernels)[\w.]*)( import )", re.MULTILINE)


def export(
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
    Raises BadInput when `model_dir` is no linearized checkpoint or is damaged, or `out` exists.
    """
    model_dir = Path(model_dir)
    config = load_config(model_dir)
    if not config.model_type.startswith(PREFIX):
        raise BadInput(
            f"{model_dir}: holds a {config.model_type} model; export takes what `linearize convert` or `train` made"
        )
    checkpoint = check_folder(model_dir)
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
        for file, text in code_files().items():
            (folder / file).write_text(text, encoding="utf-8")
        place = Path(out).resolve().name
        title, load_from = name or place, name if name and HUB_ID.fullmatch(name) else place
        write_card(folder, config, title, load_from, hub_base=hub_base, base_dir=base_dir)
        write_sums(folder)
    return {"bytes": total, "dtype": str(config.dtype).removeprefix("torch.")}


def code_files() -> dict[str, str]:
    """The model's source files by their flat names, found by following imports from the model's own module."""
    texts: dict[str, str] = {}
    waiting = [ENTRY]
    while waiting:
        module = waiting.pop()
        if _flat(module) + ".py" in texts:
            continue
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        waiting += [match[2] for match in INTERNAL_IMPORT.finditer(text)]
        texts[_flat(module) + ".py"] = INTERNAL_IMPORT.sub(lambda m: f"{m[1]}.{_flat(m[2])}{m[3]}", text)
    return texts


def _flat(module: str) -> str:
    """A flat file name: gated_kernels.window.chunk -> gated_kernels_window_chunk, the entry -> modeling_linearized."""
    return ENTRY_FILE if module == ENTRY else module.removeprefix("liger_convert.").replace(".", "_")
