"""Converts a base checkpoint to an untrained linearized one. The base's tensors are checked as they are copied.

Peak memory is a buffer and one layer of new tensors, independent of the checkpoint's size.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_convert.io import generation_config, tokenizer
from liger_convert.io.checkpoint import (
    INDEX,
    TEMPLATES,
    Checkpoint,
    copy_companions,
    load_config,
    main_dtype,
    require_tokenizer,
)
from liger_convert.io.checksums import SUMS
from liger_convert.io.files import atomic_dir
from liger_convert.io.text_part import EMBEDDINGS, HEAD
from liger_convert.model import MIXER_MODULE, linear_layers, linearized_classes, linearized_config, new_state
from liger_convert.model.bases import check_base
from liger_convert.model.loading import check_folder, check_tensors, open_checkpoint
from liger_convert.model.shards import Entry, Shard, checked_pieces, copied_shards, write_shards
from liger_convert.utils.progress import Report


def convert_checkpoint(
    base: Path | str,
    out: Path | str,
    linearization: dict[str, Any],
    *,
    dtype: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Writes the linearized checkpoint of the base in the folder `base` to the new folder `out`.

    Tensors keep the base's names and, with dtype `auto`, its bytes. `linearization` comes from a Plan.

    Returns {"tensors": {"copied", "new", "dropped"}, "bytes", "seconds"}. Raises BadInput, naming tensor and file, for
    anything missing, unexpected, truncated, not finite, or of a shape that config.json does not imply, and when `out`
    exists; LinearizeError when the disk is full. After an error nothing is left at `out`.
    """
    started = time.perf_counter()
    base = Path(base)
    base_config = load_config(base, trust_remote_code)
    check_base(base_config)
    require_tokenizer(base)
    tokenizer_class = tokenizer.class_name(base, trust_remote_code)
    checkpoint = open_checkpoint(base, base_config)
    dropped = check_tensors(checkpoint, base_config)
    generation_config.read(base, base_config.vocab_size)

    copied = [info for info in checkpoint.tensors.values() if info.name not in dropped]
    config = linearized_config(base_config, linearization)
    config.architectures = [linearized_classes(base_config.model_type)[2].__name__]
    if config.tie_word_embeddings and {HEAD, EMBEDDINGS} <= checkpoint.tensors.keys():
        # transformers ties no weights that differ, whatever a config says, but vLLM would load just one of them
        config.tie_word_embeddings = _equal(checkpoint, HEAD, EMBEDDINGS)
    config.dtype = main_dtype(copied) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        new = Entry.of(new_state(config))
    shards = [*copied_shards(checkpoint, dtype, dropped), Shard(new, _new_data(config, seed), None)]
    with atomic_dir(out) as folder:
        total = write_shards(shards, folder, progress)
        config.save_pretrained(folder)
        copy_companions(base, folder)
        generation_config.leave_out_refused(folder)
        if tokenizer_class is not None:
            tokenizer.name_class(folder, tokenizer_class)
    return {
        "tensors": {"copied": len(copied), "new": len(new), "dropped": dropped},
        "bytes": total,
        "seconds": time.perf_counter() - started,
    }


def replace_mixers(model_dir: Path, out: Path, model: Any) -> None:
    """Writes the linearized checkpoint `model_dir` with the mixers of `model` to the new folder `out`.

    Everything else is copied byte for byte, but for the checksums of an export, which would be wrong. Raises BadInput
    when `model_dir` is damaged or `out` exists, LinearizeError when the disk is full.
    """
    mixers = {name: t.cpu().contiguous() for name, t in model.state_dict().items() if f".{MIXER_MODULE}." in name}
    new = Shard(Entry.of(mixers), (tensor.view(-1) for tensor in mixers.values()), None)
    with atomic_dir(out) as folder:
        for path in (*model_dir.iterdir(), *model_dir.glob(TEMPLATES)):
            if path.is_file() and path.name not in (INDEX, SUMS) and path.suffix != ".safetensors":
                copy = folder / path.relative_to(model_dir)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        write_shards([*copied_shards(check_folder(model_dir), dropped=mixers), new], folder)


def _new_data(config: Any, seed: int) -> Iterator[Tensor]:
    for layer in linear_layers(config):
        for tensor in new_state(config, seed, [layer]).values():
            yield tensor.contiguous().view(-1)


def _equal(checkpoint: Checkpoint, *names: str) -> bool:
    """Whether two tensors of one shape have the same dtype and values. Reads both piece by piece."""
    a, b = (checkpoint.tensors[name] for name in names)
    pairs = zip(checked_pieces(a), checked_pieces(b))
    return a.dtype == b.dtype and all(torch.equal(one, other) for one, other in pairs)
