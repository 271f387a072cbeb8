"""Generates text with a model: streamed to a user, or a few continuations for a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TextStreamer

from liger_convert.data.sampling import check_finite
from liger_convert.io.inputs import check_text
from liger_convert.io.templates import render
from liger_convert.io.tokenizer import check_ids, closes_texts
from liger_convert.model.loading import load_pretrained
from liger_convert.model.placing import place
from liger_convert.utils.device import compute_dtype
from liger_convert.utils.errors import BadInput, refusing

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3  # the same as in a recipe


def load_model(folder: Path, device: torch.device, precision: str = "auto", *, trust_remote_code: bool = False) -> Any:
    """Loads the model in `folder`, a base or a linearized one, for inference on `device`. See `place`.

    precision: see `compute_dtype`. Raises BadInput as `loading.load_pretrained` does.
    """
    dtype = weight_dtype(device, precision)
    return place(load_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code), device)


def weight_dtype(device: torch.device, precision: str) -> Any:
    """The dtype that weights are loaded in: float32 if matmuls run in float32, else "auto", which keeps the stored
    one."""
    return torch.float32 if compute_dtype(device, precision) == torch.float32 else "auto"


@contextlib.contextmanager
def plain_decoding(model: Any) -> Iterator[None]:
    """Context in which `model.generate` keeps only the tokens that end a text of the model's own generation config.

    transformers lets that config fill in whatever a call leaves open: beams, penalties, limits of tokens or time, stop
    strings. With them, text that is said to be greedy would not be, or a batch could not be generated at all.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id)
    try:
        yield
    finally:
        model.generation_config = own


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = True,
    write: Callable[[str], object] | None = None,
) -> str:
    """Generates a response to `prompt` and returns its text, without the prompt.

    If there is a chat template and `chat` is set, the prompt is rendered as a user turn. Decoding is greedy at
    temperature 0, and sampled otherwise. write: called with pieces of the text as they are generated; joined, they are
    the result. Raises BadInput for an empty prompt, and for a temperature or top_p out of range, and LinearizeError for
    logits that are not finite.
    """
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise BadInput(f"temperature: should be 0, or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, not {temperature:g}")
    if not 0 < top_p <= 1:
        raise BadInput(f"top_p: should be above 0 and at most 1, not {top_p:g}")
    streamer = _Streamer(tokenizer, write) if write is not None else None
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    options |= {"streamer": streamer, "logits_processor": LogitsProcessorList([_RefuseNonFinite()])}
    torch.manual_seed(seed)
    return _complete(model, tokenizer, [prompt], max_new_tokens, chat, **options)[0]


def continuations(model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int = 48) -> list[str]:
    """Greedy responses to all `prompts`, in one batch. The prompts are user turns if there is a chat template."""
    return _complete(model, tokenizer, prompts, max_new_tokens, chat=True)


class _RefuseNonFinite(LogitsProcessor):
    """Raises LinearizeError where a model's logits are not finite: its text would be arbitrary tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_finite(scores, "the model")
        return scores


class _Streamer(TextStreamer):
    """Passes the text on to `write` in whole words, as soon as they are complete."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def _complete(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int, chat: bool, **options: Any
) -> list[str]:
    rows = [encode(tokenizer, prompt, chat) for prompt in prompts]
    width = max(len(row) for row in rows)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    options["do_sample"] = "temperature" in options
    with plain_decoding(model):
        ids = model.generate(
            input_ids=torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device),
            attention_mask=torch.tensor(
                [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device
            ),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            **options,
        )
    return tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)


def encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """The token ids of a prompt, rendered as a user turn if there is a chat template and `chat` is set.

    Raises BadInput for a prompt that is empty or not valid text, and if the template or the tokenizer fails on it.
    """
    if not prompt.strip():
        raise BadInput("the prompt is empty; give the model something to continue")
    check_text(prompt, "the prompt")
    text, template = prompt, tokenizer.chat_template if chat else None
    if template:
        text = render(tokenizer, [{"role": "user", "content": prompt}], template, ask=True)
    with refusing("the tokenizer fails on this prompt"):
        ids = tokenizer(text, add_special_tokens=not template)["input_ids"]
        if not template and closes_texts(tokenizer):
            ids = ids[:-1]
    check_ids(tokenizer, ids, "the prompt")
    return ids
