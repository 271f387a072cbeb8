"""The loss from quantizing a model's weights: compares its next-token distributions on held-out text.

Both models compute in float32, so that quantization is the only difference. The layers of only one model are in memory
at a time: of the first model, the final hidden states and the head are kept.

Shapes: N windows, T tokens of a window, C hidden size, R tokens whose logits exist at a time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_convert.data.documents import Document
from liger_convert.eval.generation import load_model
from liger_convert.eval.measures import (
    LOGIT_ROWS,
    Measurement,
    language_head,
    mean_of_windows,
    perplexity,
    text_windows,
)
from liger_convert.eval.narrow import context_of
from liger_convert.eval.suites import TextMeasure
from liger_convert.utils.progress import Report

WINDOW, WINDOWS = 512, 16  # tokens of a window, and the number of windows


def windows_of_text(tokenizer: Any, documents: Sequence[Document], config: Any) -> Tensor:
    """The first windows of the documents, int64 [N,T]. config: the model's, which may limit the length of a window.

    Raises BadInput if there are fewer than two.
    """
    measure = TextMeasure(name="text", window=min(WINDOW, context_of(config)), windows=WINDOWS)
    return text_windows(tokenizer, documents, measure)


def quantization_loss(
    before: Path, after: Path, ids_NT: Tensor, device: torch.device, report: Report = lambda done, total, note="": None
) -> dict[str, Measurement]:
    """Compares the quantized model in the folder `after` with the model in `before`, on the same windows.

    `ppl_before` and `ppl`: the perplexities. `loss_added`: the increase of the mean loss, in nats per token. `kl`:
    KL(before || after), in nats per token. `same_token`: the fraction of tokens at which the likeliest token is the
    same. Standard errors are over windows; n = windows. Raises BadInput if a model cannot be loaded.
    """
    with torch.inference_mode():
        first = load_model(before, device, "float32")
        hidden_NTC = torch.cat([_backbone(first, ids_T).last_hidden_state.cpu() for ids_T in ids_NT])
        first.get_decoder().layers = nn.ModuleList()  # keeps only its head
        second, found = load_model(after, device, "float32"), []
        for n, ids_T in enumerate(ids_NT):
            output = _backbone(second, ids_T)
            found.append(_compare(first, second, output, hidden_NTC[n].to(device), ids_T.to(device)))
            report(n + 1, len(ids_NT))
    scored_N = torch.full((len(ids_NT),), ids_NT.shape[1] - 1).numpy()
    was_N, is_N, kl_N, same_N = torch.stack(found).double().unbind(1)
    tokens = ids_NT.shape[1] - 1
    return {
        "ppl_before": perplexity(was_N.numpy(), scored_N),
        "ppl": perplexity(is_N.numpy(), scored_N),
        "loss_added": mean_of_windows((is_N - was_N) / tokens),
        "kl": mean_of_windows(kl_N / tokens),
        "same_token": mean_of_windows(same_N / tokens),
    }


def _backbone(model: Any, ids_T: Tensor) -> Any:
    return model.get_decoder()(input_ids=ids_T[None].to(model.device), use_cache=False)


def _compare(first: Any, second: Any, output: Any, hidden_TC: Tensor, ids_T: Tensor) -> Tensor:
    """Sums over the tokens of a window, float64 [4]: the losses before and after, the KL divergence, and the number of
    equal predictions. output: of the backbone of `second`. hidden_TC: the final hidden states of `first`."""
    sums = torch.zeros(4, dtype=torch.float64)
    rows = zip(hidden_TC[:-1].split(LOGIT_ROWS), output.last_hidden_state[0, :-1].split(LOGIT_ROWS))
    with language_head(first, output) as head_before, language_head(second, output) as head_after:
        for (was_RC, is_RC), targets_R in zip(rows, ids_T[1:].split(LOGIT_ROWS)):
            was_RV = head_before(was_RC).float().log_softmax(-1)
            is_RV = head_after(is_RC).float().log_softmax(-1)
            losses = [-x_RV.gather(1, targets_R[:, None])[:, 0] for x_RV in (was_RV, is_RV)]
            kl_R = (was_RV.exp() * (was_RV - is_RV)).sum(-1)
            same_R = was_RV.argmax(-1) == is_RV.argmax(-1)
            sums += torch.stack([x_R.double().sum().cpu() for x_R in (*losses, kl_R, same_R)])
    return sums
