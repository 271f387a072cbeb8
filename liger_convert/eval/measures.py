"""Our own measures: perplexity per token and per byte, loss by position, and loss on a repetition.

All of them work on any causal language model of transformers. Every value comes with its standard error and `n`, the
number of independent windows or draws that it is averaged over.

Shapes: N windows, T tokens of a window, B batch, R tokens whose logits exist at a time, C hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from liger_convert.data.documents import Document
from liger_convert.eval.suites import FIRST_END, KINDS, CopyMeasure, PositionMeasure, TextMeasure
from liger_convert.io.tokenizer import text_prefix
from liger_convert.utils.device import autocast
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report

Measurement = dict[str, float | int | None]  # value, stderr, n
ROW = 256  # tokens that `batch_size` counts as one row
LOGIT_ROWS = 512  # tokens whose logits exist at a time; 100 MB in float32 for a vocabulary of 50,000


def measurement(value: float, stderr: float | None, n: int) -> Measurement:
    """A measurement. Values that are not finite become None, because JSON has no infinity and no NaN."""
    finite = [x if x is not None and math.isfinite(x) else None for x in (value, stderr)]
    return {"value": finite[0], "stderr": finite[1], "n": n}


def text_perplexity(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    measure: TextMeasure,
    *,
    batch_size: int,
    dtype: torch.dtype,
    report: Report,
) -> dict[str, Measurement]:
    """Perplexity on the first `measure.windows` windows of `measure.window` tokens of the concatenated documents.

    The documents are concatenated in order, without separators. Windows do not overlap and are independent: each is one
    forward pass from position 0. If the tokenizer begins every text with a BOS token, so does every window. The tokens
    from index `measure.score_from` on are scored, each given all tokens before it in its window. It is at least 1,
    since nothing precedes the first token. Tokens that the tokenizer puts before every text are not scored.

    `<name>_ppl` = exp(mean loss per scored token). Its standard error is over windows, by the delta method: value x
    standard error of the mean loss. `<name>_byte_ppl` = exp(summed loss / UTF-8 bytes of the scored text). Special
    tokens have no bytes, and a character that is cut by a window's edge counts as 3 bytes. n = windows. dtype: the
    compute dtype.

    Raises BadInput if the documents do not fill two windows.
    """
    ids_NT, first = text_windows(tokenizer, documents, measure), _first_scored(tokenizer, measure)
    losses_NT = window_losses(model, ids_NT, batch_size, dtype, lambda done: report(done, len(ids_NT), measure.name))
    losses_N = losses_NT[:, first - 1 :].sum(1, dtype=torch.float64).numpy()
    bytes_N = np.array([_bytes(tokenizer, row) - _bytes(tokenizer, row[:first]) for row in ids_NT.tolist()])
    tokens_N = np.full(len(ids_NT), ids_NT.shape[1] - first)
    return {
        name: perplexity(losses_N, size_N) for name, size_N in zip(measure.metrics, (tokens_N, bytes_N), strict=True)
    }


def worse_than_frequencies(
    perplexity: Measurement, tokenizer: Any, documents: Sequence[Document], measure: TextMeasure, of: str | None = None
) -> str | None:
    """A sentence if a base's `perplexity`, of `text_perplexity` with these arguments, is above what the frequencies of
    the scored tokens give without any context; else None. Then the base has little to give to a linearized model. of:
    what the sentence calls the text, if not by the measure's source."""
    ids = text_windows(tokenizer, documents, measure)[:, _first_scored(tokenizer, measure) :]
    share = ids.unique(return_counts=True)[1].double() / ids.numel()
    known, value = math.exp(-(share * share.log()).sum().item()), perplexity["value"]
    if value is not None and value <= known:
        return None
    found = "not finite" if value is None else f"{value:.4g}"
    told = (
        f"the base's perplexity on {of or KINDS[measure.source]} is {found}, where the frequencies of tokens give "
        f"{known:.4g}"
    )
    return f"{told}: its tokenizer or weights may be damaged, or it was made for other text"


def position_losses(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    measure: PositionMeasure,
    *,
    batch_size: int,
    dtype: torch.dtype,
    report: Report,
) -> dict[str, Measurement]:
    """Mean loss by range of positions: [1, ends[0]), [ends[0], ends[1]), … with `ends` = `measure.ends`.

    Windows are those of `text_perplexity`, each one forward pass. The loss of a model that uses its whole context falls
    with the position; that of a model that sees only a window does not. The standard error is over the windows' means;
    n = windows. dtype: the compute dtype.

    Documents that do not fill two windows are read in shorter ones, so that the last ranges are missing. Raises
    BadInput if they do not fill two windows of the first range.
    """
    half = len(text_stream(documents)) // 2 + len(text_prefix(tokenizer))
    measure = measure.at_most(max(half, FIRST_END))
    ids_NT = text_windows(tokenizer, documents, measure)[:, : measure.ends[-1]]
    losses_NT = window_losses(model, ids_NT, batch_size, dtype, lambda done: report(done, len(ids_NT), measure.name))
    first = max(1, len(text_prefix(tokenizer)))  # nothing precedes the first token; a prefix is given
    begins = [first, *measure.ends]
    return {
        metric: mean_of_windows(losses_NT[:, begin - 1 : end - 1].mean(1, dtype=torch.float64))
        for metric, begin, end in zip(measure.metrics, begins, measure.ends)
    }


def copy_loss(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    measure: CopyMeasure,
    *,
    batch_size: int,
    dtype: torch.dtype,
    report: Report,
) -> dict[str, Measurement]:
    """Mean loss on the second half of [x, x], |x| = `measure.length`: how well the model remembers x.

    The first token of the second half is not scored, since it cannot be predicted that x starts again. The standard
    error is over the draws' mean losses; n = draws. dtype: the compute dtype. Raises BadInput if the documents do not
    hold two spans.
    """
    ids_NT, (name,) = repetitions(tokenizer, documents, measure), measure.metrics
    losses_NT = window_losses(model, ids_NT, batch_size, dtype, lambda done: report(done, len(ids_NT), name))
    return {name: mean_of_windows(losses_NT[:, -(measure.length - 1) :].mean(1, dtype=torch.float64))}


def repetitions(tokenizer: Any, documents: Sequence[Document], measure: CopyMeasure) -> Tensor:
    """The sequences [x, x] of all draws, int64 [N,T], |x| = `measure.length`.

    x is a span of the documents. The `measure.draws` spans are evenly spaced and do not overlap; there are fewer if the
    documents are too short. With `tokens: uniform`, x is drawn uniformly from the vocabulary without special tokens,
    always with the same seed. If the tokenizer begins every text with a BOS token, so does each sequence. Raises
    BadInput if the documents do not hold two spans.
    """
    length = measure.length
    if measure.tokens == "uniform":
        size = getattr(tokenizer, "embeddings", math.inf)  # see tokenizer.load
        ordinary = sorted({i for i in tokenizer.get_vocab().values() if i < size} - set(tokenizer.all_special_ids))
        x_NT = np.random.default_rng(0).choice(ordinary, (measure.draws, length))
    else:
        x_NT = text_spans(documents, length, measure.draws, KINDS["held_out"])
    return begun(tokenizer, np.concatenate([x_NT, x_NT], 1))


def text_spans(documents: Sequence[Document], length: int, count: int, kind: str) -> np.ndarray:
    """`count` evenly spaced, non-overlapping spans of `length` tokens of the concatenated documents, [N,T].

    There are fewer if the documents are too short. kind: what error messages call the documents. Raises BadInput if
    they do not hold two spans.
    """
    stream = text_stream(documents)
    count = min(count, len(stream) // length)
    if count < 2:
        raise BadInput(f"{kind}: {len(stream)} tokens are too few for two spans of {length}")
    return np.stack([stream[i * (len(stream) // count) :][:length] for i in range(count)])


def begun(tokenizer: Any, rows_NT: np.ndarray) -> Tensor:
    """The rows, each with the tokens in front that the tokenizer puts before every text, int64 [N,T]."""
    return _prefixed(text_prefix(tokenizer), rows_NT)


def token_losses(model: Any, ids_BT: Tensor) -> Tensor:
    """The loss of tokens 1 to T - 1, each given those before it, float32 [B,T-1]. Runs in the caller's autocast."""
    output = model.get_decoder()(input_ids=ids_BT, use_cache=False)
    hidden_NC, targets_N = output.last_hidden_state[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
    parts = [
        cross_entropy(logits_RV, targets_R, reduction="none")
        for logits_RV, targets_R in _in_parts(model, output, hidden_NC, targets_N)
    ]
    return torch.cat(parts).view(len(ids_BT), -1)


def target_losses(
    model: Any, ids_BT: Tensor, row_N: Tensor, column_N: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each target, given the tokens of its row of `ids_BT` up to and including its column, float32 [N]; and
    whether it is the likeliest token, bool [N]. Runs in the caller's autocast."""
    output = model.get_decoder()(input_ids=ids_BT, use_cache=False)
    losses, greedy = [], []
    for logits_RV, targets_R in _in_parts(model, output, output.last_hidden_state[row_N, column_N], targets_N):
        losses.append(cross_entropy(logits_RV, targets_R, reduction="none"))
        greedy.append(logits_RV.argmax(-1) == targets_R)
    return torch.cat(losses), torch.cat(greedy)


def likeliest(model: Any, ids_BT: Tensor, row_N: Tensor, column_N: Tensor) -> Tensor:
    """The likeliest next token after the tokens of each row of `ids_BT` up to and including the column, int64 [N]."""
    output = model.get_decoder()(input_ids=ids_BT, use_cache=False)
    hidden_NC = output.last_hidden_state[row_N, column_N]
    return torch.cat([logits_RV.argmax(-1) for logits_RV, _ in _in_parts(model, output, hidden_NC, column_N)])


def _in_parts(model: Any, output: Any, hidden_NC: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (logits float32 [R,V], targets [R]) for LOGIT_ROWS tokens at a time. The logits of all tokens together
    would be by far the largest tensor."""
    with language_head(model, output) as logits:
        for x_RC, targets_R in zip(hidden_NC.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS)):
            yield logits(x_RC).float(), targets_R


@contextlib.contextmanager
def language_head(model: Any, output: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Context with a function from hidden states [R,C] to logits [R,V]. It runs the model's own forward pass with the
    backbone bypassed. output: an output of the backbone, whose type and other fields are reused.

    The `lm_head` alone would not be enough, because some families scale or cap its output.
    """
    backbone = model.get_decoder()
    own = vars(backbone).get("forward")  # set if accelerate has spread the model over devices

    def logits(hidden_RC: Tensor) -> Tensor:
        given = type(output)(**{**output, "last_hidden_state": hidden_RC[None]})
        backbone.forward = lambda *_, **__: given
        return model(inputs_embeds=hidden_RC[None], use_cache=False).logits[0]

    try:
        yield logits
    finally:
        vars(backbone).pop("forward", None)
        if own is not None:
            backbone.forward = own


def window_losses(
    model: Any, ids_NT: Tensor, batch_size: int, dtype: torch.dtype, done: Callable[[int], None] = lambda windows: None
) -> Tensor:
    """`token_losses` of all windows, float32 [N,T-1] on the CPU.

    A batch has `batch_size` windows of up to ROW tokens, and proportionally fewer of longer ones. dtype: the compute
    dtype. done: called with the number of finished windows.
    """
    parts = []
    batch_size = max(1, batch_size * ROW // max(ROW, ids_NT.shape[1]))
    # a single autocast for all batches, which casts each weight only once
    with torch.inference_mode(), autocast(model.device, dtype):
        for start in range(0, len(ids_NT), batch_size):
            parts.append(token_losses(model, ids_NT[start : start + batch_size].to(model.device)).cpu())
            done(min(start + batch_size, len(ids_NT)))
    return torch.cat(parts)


def text_stream(documents: Sequence[Document]) -> np.ndarray:
    """The concatenated tokens of the documents, without the BOS token that each document may begin with."""
    parts = [document.ids[document.begin :] for document in documents]
    return np.concatenate([np.empty(0, np.int64), *parts])


def text_windows(tokenizer: Any, documents: Sequence[Document], measure: TextMeasure | PositionMeasure) -> Tensor:
    """The first windows of the concatenated documents, int64 [N,T], T = `measure.window`, each with the BOS token if
    the tokenizer adds one. Raises BadInput if there are fewer than two."""
    prefix = text_prefix(tokenizer)
    stream, size = text_stream(documents), measure.window - len(prefix)
    if size < 1:
        what = f"the {len(prefix)} tokens that begin every text leave no room in a window of {measure.window}"
        raise BadInput(f"{KINDS[measure.source]}: {what}; measure longer ones")
    windows = min(measure.windows, len(stream) // size)
    if windows < 2:
        raise BadInput(f"{KINDS[measure.source]}: {len(stream)} tokens do not fill two windows of {measure.window}")
    return _prefixed(prefix, stream[: windows * size].reshape(windows, size))


def _first_scored(tokenizer: Any, measure: TextMeasure) -> int:
    return max(measure.score_from, len(text_prefix(tokenizer)))


def _prefixed(prefix: list[int], rows_NT: np.ndarray) -> Tensor:
    prefix_NM = np.tile(np.array(prefix, np.int64), (len(rows_NT), 1))
    return torch.from_numpy(np.concatenate([prefix_NM, rows_NT], 1))


def _bytes(tokenizer: Any, ids: list[int]) -> int:
    return len(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())


def mean_of_windows(values_N: Tensor) -> Measurement:
    """The mean of the values and its standard error. n = the number of values."""
    stderr = values_N.std().item() / math.sqrt(len(values_N))
    return measurement(values_N.mean().item(), stderr, len(values_N))


def ratio(sums_N: np.ndarray, sizes_N: np.ndarray) -> tuple[float, float]:
    """sum(sums) / sum(sizes), and the standard error of that ratio over the N >= 2 samples."""
    n = len(sums_N)
    mean = sums_N.sum() / sizes_N.sum()
    residuals_N = (sums_N - mean * sizes_N) / sizes_N.mean()
    return mean, math.sqrt(np.square(residuals_N).sum() / (n * (n - 1)))


def perplexity(losses_N: np.ndarray, sizes_N: np.ndarray) -> Measurement:
    """exp(sum of losses / sum of sizes), with its standard error by the delta method."""
    mean, stderr = ratio(losses_N, sizes_N)
    with np.errstate(over="ignore"):
        value = float(np.exp(mean))
    return measurement(value, value * stderr, len(losses_N))
