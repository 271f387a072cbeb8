"""Whether a model says what its base says, on text that the base wrote by itself.

The base writes greedily behind some prompts, once. Every model then reads what the base wrote, in one forward pass a
row, and is asked at each position which token it would say there. Up to the first position where that is another one,
its own greedy text is the base's, so both metrics come of the same pass. Accuracy on tasks shows little of this.
Shapes: N prompts, or tokens that the base wrote behind one; B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import torch

from liger_convert.data.documents import Document
from liger_convert.eval.measures import Measurement, begun, likeliest, measurement, ratio, text_spans
from liger_convert.eval.suites import KINDS, AgreementMeasure
from liger_convert.io.templates import render
from liger_convert.utils.device import autocast
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report

# One conversation; its last turn asks for what only the first one tells.
CHAT = (
    "I live in an old lighthouse and look after seven goats. What should I put aside before the winter storms?",
    "One of the goats no longer eats well. What may be the reason, and what can I try first?",
    "Thank you. How many goats do I look after, and where do I live?",
)


class Row(TypedDict):
    """A prompt and what the base wrote behind it.

    start: the first token that it wrote. said: what the base says at each position from there on, given all before it;
    that is what it wrote, but for near ties that rounding decided."""

    ids: list[int]
    start: int
    said: list[int]
    chat: bool


def write_rows(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    measure: AgreementMeasure,
    *,
    context: int,
    batch_size: int,
    dtype: torch.dtype,
    report: Report,
) -> list[Row]:
    """What the base `model` writes: behind spans of the documents, and where the tokenizer has a chat template in a
    conversation of three turns, each behind what it answered before. It stops where it ends its text.

    context: tokens that the base takes; turns that do not fit are left out, and so is a conversation that its template
    refuses. Plain data, so that it can be kept. Raises BadInput when the documents do not hold two prompts.
    """
    spans_NT = text_spans(tokenizer, documents, measure.prompt_tokens, measure.prompts, KINDS[measure.source])
    prompts_NT = begun(tokenizer, spans_NT)
    rows: list[Row] = []
    with torch.inference_mode(), autocast(model.device, dtype):
        for prompts_BT in prompts_NT.split(batch_size):
            for ids, written in zip(prompts_BT.tolist(), _write(model, tokenizer, prompts_BT, measure.tokens)):
                rows.append(_row(model, ids, written, chat=False))
            report(len(rows), len(prompts_NT), "what the base writes")
        rows += _answers(model, tokenizer, measure.tokens, context)
    return rows


def _answers(model: Any, tokenizer: Any, tokens: int, context: int) -> Iterator[Row]:
    messages: list[dict[str, str]] = []
    for question in CHAT if tokenizer.chat_template else ():
        messages.append({"role": "user", "content": question})
        try:
            text = render(tokenizer, messages, tokenizer.chat_template, ask=True)
        except BadInput:
            return
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) + tokens > context:
            return
        (written,) = _write(model, tokenizer, torch.tensor([ids]), tokens)
        yield _row(model, ids, written, chat=True)
        messages.append({"role": "assistant", "content": tokenizer.decode(written, skip_special_tokens=True).strip()})


def _write(model: Any, tokenizer: Any, prompts_BT: torch.Tensor, tokens: int) -> list[list[int]]:
    """The greedy continuation of each prompt, up to the token that ends a text."""
    end = model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or [])
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    # what a model's own generation config says about sampling and repetitions must not decide it
    plain = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
    ids_BT = prompts_BT.to(model.device)
    mask_BT = torch.ones_like(ids_BT)
    made_BT = model.generate(input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=tokens, pad_token_id=pad, **plain)
    rows = made_BT[:, ids_BT.shape[1] :].tolist()
    stops = (next((i for i, token in enumerate(row, 1) if token in ends), len(row)) for row in rows)
    return [row[:stop] for row, stop in zip(rows, stops)]


def _row(model: Any, ids: list[int], written: list[int], *, chat: bool) -> Row:
    row: Row = {"ids": ids + written, "start": len(ids), "said": [], "chat": chat}
    return {**row, "said": _said(model, row)}


def _said(model: Any, row: Row) -> list[int]:
    """What `model` says at each position that the base wrote. A row at a time, so that how many models or rows are
    measured at once changes nothing."""
    ids_BT = torch.tensor([row["ids"][:-1]], device=model.device)
    column_N = torch.arange(row["start"] - 1, ids_BT.shape[1], device=model.device)
    return likeliest(model, ids_BT, torch.zeros_like(column_N), column_N).tolist()


def agreement(model: Any, rows: Sequence[Row], *, dtype: torch.dtype, report: Report) -> dict[str, Measurement]:
    """How much of what the base wrote in `rows` the model says as well; the base itself says all of it.

    `agreement/greedy_match`: the fraction of the positions at which the model's likeliest token is the base's.
    `agreement/common_prefix`: how many tokens the model's own greedy text shares with the base's before the first that
    differs, the mean over rows. `agreement/chat_match`: the first of the two, of the turns of a conversation only; it
    is missing where there are none. Standard errors are over rows; n = rows.
    """
    same: list[np.ndarray] = []
    with torch.inference_mode(), autocast(model.device, dtype):
        for done, row in enumerate(rows, 1):
            same.append(np.equal(_said(model, row), row["said"]))
            report(done, len(rows), "agreement")
    prefixes = [int(np.logical_and.accumulate(same_N).sum()) for same_N in same]
    chat = [same_N for row, same_N in zip(rows, same) if row["chat"]]
    found = {
        "agreement/greedy_match": _ratio([same_N.sum() for same_N in same], [len(same_N) for same_N in same]),
        "agreement/common_prefix": _ratio(prefixes, [1] * len(prefixes)),
    }
    if chat:
        found["agreement/chat_match"] = _ratio([same_N.sum() for same_N in chat], [len(same_N) for same_N in chat])
    return found


def _ratio(sums: Sequence[int], sizes: Sequence[int]) -> Measurement:
    if len(sums) < 2:
        return measurement(sum(sums) / sum(sizes), None, len(sums))
    value, stderr = ratio(np.array(sums, np.float64), np.array(sizes, np.float64))
    return measurement(float(value), stderr, len(sums))
