"""Document boundaries in packed rows, from whichever of a collator's inputs describes them.

Shapes: B batch, T tokens, N documents in all rows together.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_positions(
    rows: int, tokens: int, position_ids: Tensor | None, cu_seq_lens: Tensor | None, seq_idx: Tensor | None
) -> Tensor | None:
    """Position ids that restart at every document, by which the family's softmax layers and ours separate documents.

    position_ids: [B or 1,T], already restarting at every document, or None. cu_seq_lens: int [N+1], cumulative document
    boundaries in the flattened batch. seq_idx: int [B,T], the document index of every token. Returns [B,T], or
    `position_ids` unchanged if it is given or no row has a second document. Raises ValueError when the inputs
    contradict each other.
    """
    for name, begins_BT in (
        ("cu_seq_lens_q", None if cu_seq_lens is None else _begins(rows, tokens, cu_seq_lens)),
        ("seq_idx", None if seq_idx is None else seq_idx[:, 1:] != seq_idx[:, :-1]),
    ):
        if begins_BT is None:
            continue
        if position_ids is None:
            if not bool(begins_BT.any()):
                continue
            index_T = torch.arange(tokens, device=begins_BT.device)
            start_BT = torch.where(begins_BT, index_T[1:], 0).cummax(1).values
            position_ids = index_T - torch.nn.functional.pad(start_BT, (1, 0))
        elif not torch.equal((position_ids.diff(dim=1) != 1).expand_as(begins_BT), begins_BT):
            raise ValueError(
                f"{name} and position_ids name different documents: a packed row's position_ids must restart where a "
                "document begins and nowhere else; or leave position_ids out"
            )
    return position_ids


def document_ids(position_ids_BT: Tensor) -> Tensor:
    """int64 [B,T]: the index of each token's document in its row, from positions that restart at every document. Reads
    no value on the host."""
    follows_BT = position_ids_BT.diff(dim=1, prepend=position_ids_BT[:, :1] - 1) == 1
    return (~follows_BT).cumsum(1)


def _begins(rows: int, tokens: int, cu_seq_lens: Tensor) -> Tensor:
    """bool [B,T-1]: whether a document begins at each token after the first of its row."""
    if int(cu_seq_lens[-1]) != rows * tokens:
        raise ValueError(f"cu_seq_lens_q ends at token {int(cu_seq_lens[-1])}, but the batch has {rows * tokens}")
    begins_N = torch.zeros(rows * tokens + 1, dtype=torch.bool, device=cu_seq_lens.device)
    begins_N[cu_seq_lens.long()] = True
    return begins_N[:-1].view(rows, tokens)[:, 1:]


def check_mask(attention_mask: Tensor, position_ids: Tensor | None, tokens: int, seen_B: Tensor | None) -> None:
    """Raises ValueError for a mask that a linearized layer would misread.

    Refused are masks with values other than 0 and 1, masks that do not match the tokens in the cache, and masks
    together with position_ids that restart. attention_mask: [B, earlier tokens + T]. tokens: T. seen_B: how many tokens
    of each row the cache has read; None without a cache.
    """
    valid_BS = attention_mask != 0
    if attention_mask.dtype != torch.bool and bool((attention_mask != valid_BS).any()):
        raise ValueError(
            "attention_mask holds values other than 0 and 1: a linearized layer takes a padding mask; it tells packed "
            "documents apart by position_ids that restart, without attention_mask"
        )
    earlier = valid_BS[:, :-tokens]
    if seen_B is not None and earlier.shape[1] and bool((earlier.sum(1) != seen_B.to(earlier.device)).any()):
        raise ValueError(
            "attention_mask does not cover the tokens that the cache has read: a linearized layer cannot mask a token "
            "later; pass the mask from the first call on"
        )
    if position_ids is not None and tokens > 1:
        valid_BT = valid_BS[:, -tokens:].to(position_ids.device)
        restarts_BT = (position_ids.diff(dim=1) < 1) & valid_BT[:, 1:] & valid_BT[:, :-1]
        if bool(restarts_BT.any()):
            raise ValueError(
                "attention_mask and position_ids that restart contradict each other: the mask makes a row one "
                "document, the positions make it several; leave attention_mask out for packed documents"
            )
