"""Extracts the text model of a vision-language model into its own folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# model types that, on text alone, compute the same as their text model
COMPOSITES = ("mistral3", "gemma3")
# tensor names: as published, and as transformers names its modules
STORED = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def text_config(config: Any) -> Any:
    """The config of a composite's text model; the config of any other model is returned unchanged."""
    if config.model_type not in COMPOSITES:
        return config
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def text_name(name: str) -> str | None:
    """The text model's name of a composite's tensor; None for a tensor of another part."""
    if name == HEAD:
        return name
    if (match := STORED.fullmatch(name)) is None:
        return None
    return match[1] if match[1] == HEAD else f"model.{match[1]}"


def write_text_part(checkpoint: Any, config: Any, folder: Path, index: str, weights: str) -> int:
    """Writes the text model of a composite's `checkpoint`, with its config, into the existing folder `folder`.

    Returns the number of tensors that belong to other parts. index, weights: the file names of the shard index, and of
    the weights if there is a single shard. Only one shard is in memory at a time.
    """
    text = text_config(config)
    shards = {}
    for file, infos in checkpoint.files.items():
        names = {info.name: text_name(info.name) for info in infos}
        kept = {name: own for name, own in names.items() if own is not None}
        if kept:
            shards[file] = kept
    every = {own: name for kept in shards.values() for name, own in kept.items()}
    if {HEAD, EMBEDDINGS} <= every.keys():  # tie_word_embeddings may be just a default
        head, embeddings = checkpoint.read(every[HEAD]), checkpoint.read(every[EMBEDDINGS])
        text.tie_word_embeddings = text.tie_word_embeddings and torch.equal(head, embeddings)
    weight_map: dict[str, str] = {}
    for number, kept in enumerate(shards.values(), 1):
        shard = weights if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({own: checkpoint.read(name) for name, own in kept.items()}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(kept.values(), shard)
    if len(shards) > 1:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    text.save_pretrained(folder)
    return len(checkpoint.tensors) - len(every)
