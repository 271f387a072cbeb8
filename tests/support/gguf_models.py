"""Tiny llamas as llama.cpp stores them: in one file or in parts, and in any of its types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tiny import CHAT_TEMPLATE
from torch import Tensor

SAMPLE = "model.layers.0.mlp.down_proj.weight"  # whose rows stand as they do in the model


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    vocabulary: str = "default",
    without: str = "",
    kind: GGMLQuantizationType | None = None,
    parts: int = 1,
    fields: dict[str, int | float | str] | None = None,
    factors: np.ndarray | None = None,
    words: tuple[str, ...] = (),
    control: tuple[str, ...] = (),
    architecture: str | None = None,
    template: str = CHAT_TEMPLATE,
) -> dict[str, np.ndarray]:
    """Writes `model`, a tiny llama, qwen3 or phi3: under its own names, a llama's rows of q and k in pairs for rotary.

    without: the name of a tensor that is left out. kind: what matrices are stored as; None: as they are. parts: into
    how many files, named after `path`. fields: more numbers and words of the header. factors: what the rotary's
    frequencies are divided by. words: more tokens, of which no merge makes one. control: more, of the control type.
    architecture: what the header calls it, if not by the family. template: for chats. Returns the bytes of the matrices
    by the model's names.
    """
    every: Any = model.config
    family = every.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], every.num_hidden_layers)
    tensors: list[tuple[str, np.ndarray, GGMLQuantizationType | None]] = []
    stored = {}
    for name, tensor in model.state_dict().items():
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = tensor.unflatten(0, (-1, 2, every.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        own = None if kind is None or tensor.dim() == 1 or "embed" in name or "lm_head" in name else kind
        data = tensor.contiguous().numpy() if own is None else quantized(tensor, own)
        if name != without:
            stored[name] = data
            tensors.append((names.get_name(name, (".weight", ".bias")), data, own))
    for number in range(parts):
        file = path if parts == 1 else path.with_name(f"{path.stem}-{number + 1:05}-of-{parts:05}.gguf")
        writer = gguf.GGUFWriter(file, architecture or family)
        if number == 0:
            _write_fields(writer, every, vocabulary, words, control, template)
            for name, value in (fields or {}).items():
                adds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
                (adds | {bool: writer.add_bool})[type(value)](name, value)
            if factors is not None:
                tensors.append(("rope_freqs.weight", factors, None))
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(tensors))
        for name, data, own in tensors[number::parts]:
            writer.add_tensor(name, data, raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return stored


def quantized(tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    """The tensor's bytes in this type, or small ones where the package can only read it."""
    try:
        return gguf.quantize(tensor.contiguous().numpy(), kind)
    except NotImplementedError:
        block, nbytes = GGML_QUANT_SIZES[kind]
        bytes_per_row = tensor.shape[1] // block * nbytes
        return np.random.default_rng(0).integers(0, 16, (tensor.shape[0], bytes_per_row), dtype=np.uint8)


def _write_fields(
    writer: gguf.GGUFWriter,
    config: Any,
    vocabulary: str,
    words: tuple[str, ...],
    control: tuple[str, ...],
    template: str,
) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary)
    tokens = [chr(c) for c in range(33, 127)] + ["12", "Ġ", "Ċ", "<s>", "</s>", "Ġa", "ab", *words, *control]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>", *control) else 1 for token in tokens])
    writer.add_token_merges(["1 2", "Ġ a", "a b"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_chat_template(template)
