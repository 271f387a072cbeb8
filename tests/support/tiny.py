"""Tiny random models of every family, and a tiny real tokenizer, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


# the first and the last are linearized: one of each kind
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 8,  # so that queries grow within a test's tokens
    "max_position_embeddings": 256,
    "llama_4_scaling_beta": 0.5,
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Three layers, four heads in pairs that share keys, 101 tokens; each family's peculiarities switched on."""
    values: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,  # large enough for attention and its gates to matter
    }
    values |= {
        "llama": {"head_dim": 8},
        "mistral": {"sliding_window": 24},
        "ministral": {"head_dim": 8, "sliding_window": 24, "layer_types": MIXED},
        "ministral3": {"head_dim": 8, "rope_parameters": YARN},
        "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
        "qwen3": {"head_dim": 16},
        "phi3": {"partial_rotary_factor": 0.5},
        "gemma": {"head_dim": 16},
        "gemma2": {
            "head_dim": 16,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 2.0,
            "sliding_window": 24,
            "layer_types": MIXED,
        },
        "gemma3_text": {
            "head_dim": 16,
            "query_pre_attn_scalar": 6,
            "sliding_window": 24,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        },
        "glm4": {
            "head_dim": 8,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        "glm": {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5},
        "cohere": {"use_qk_norm": True},
        "cohere2": {"sliding_window": 24, "layer_types": MIXED},
        "exaone4": {"head_dim": 8, "sliding_window": 24, "layer_types": MIXED},
        "ernie4_5": {"head_dim": 8, "use_bias": True},
        "helium": {"head_dim": 8, "attention_bias": True},
        "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "arcee": {"head_dim": 8},
        "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
        "nemotron": {"head_dim": 8, "partial_rotary_factor": 0.5},
        "olmo": {"clip_qkv": 1.0},
        "olmo3": {"sliding_window": 24, "layer_types": MIXED},
        "smollm3": {"no_rope_layers": [1, 0, 1]},
        "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5},
        "starcoder2": {"sliding_window": 24},
        "stablelm": {
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8},
        "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0},
    }.get(model_type, {})
    values |= changes
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    return CONFIG_MAPPING[model_type](**values)


def tiny_tokenizer(vocab_size: int = 101) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer over printable ASCII with a chat template; any text of it round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = ["<pad>", "<s>", "</s>", "Ġ", "Ċ"] + [chr(c) for c in range(33, 127)]
    vocab = {symbol: i for i, symbol in enumerate(symbols[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def closing_tokenizer() -> PreTrainedTokenizerFast:
    """The same, but it puts the end-of-text token behind every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def save_tiny_base(model_type: str, path: Path, seed: int = 0, tokenizer: bool = True, **changes: Any) -> Path:
    """A base folder as `save_pretrained` leaves it."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).save_pretrained(path)
    if tokenizer:
        tiny_tokenizer().save_pretrained(path)
    return path
