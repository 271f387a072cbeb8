"""Rows of only those tokens that a memory deals with, so that a scan of it does not run over the others.

What a token neither writes nor reads it leaves as it is, so that memory's row leaves the token out. Heads route for
themselves: a slot of a row holds another token for each of them. A scan has one segment id for all heads of a slot, so
a document of a packed row begins at one slot for all heads, behind the longest of the document before it.

Shapes: B batch, T tokens, H query heads, G key-value heads, N memories, D documents, L slots of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Rows(NamedTuple):
    """One memory's rows: which token is in each slot (any in an empty one), whether it is written to the memory, and
    its document (None where a row is one)."""

    token_BLG: Tensor
    written_BLG: Tensor
    segment_ids_BL: Tensor | None

    def entries(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of the slots, each [B,L,G,*]; zeros where nothing is written."""
        empty_BLG1 = ~self.written_BLG[..., None]
        return tuple(take(x_BTGX, self.token_BLG).masked_fill_(empty_BLG1, 0) for x_BTGX in entries)


def make_rows(writes_BTGN: Tensor, reads_BTGN: Tensor, segment_ids_BT: Tensor | None) -> tuple[list[Rows], Tensor]:
    """The rows of each memory, and [B,T,G,N] where a token is in all of them, one behind the other.

    The rows hold the tokens that are true in `writes_BTGN` or in `reads_BTGN`, in their order. How long they are is
    read from the device. `segment_ids_BT`, from 0 on, may be None.
    """
    B, T, G, N = writes_BTGN.shape
    device, here_BTGN = writes_BTGN.device, writes_BTGN | reads_BTGN
    document_BT = torch.zeros(B, T, device=device) if segment_ids_BT is None else segment_ids_BT
    documents = 1 if segment_ids_BT is None else int(segment_ids_BT.max()) + 1
    document_BTGN = document_BT.long()[:, :, None, None].expand_as(here_BTGN)
    count_BDGN = torch.zeros(B, documents, G, N, dtype=torch.long, device=device)
    count_BDGN.scatter_add_(1, document_BTGN, here_BTGN.long())
    end_BDN = count_BDGN.amax(2).cumsum(1)
    # where a document begins in its row, less how many tokens of the documents before it are there
    shift_BDGN = F.pad(end_BDN, (0, 0, 1, -1))[:, :, None] - F.pad(count_BDGN.cumsum(1), (0, 0, 0, 0, 1, -1))
    slot_BTGN = here_BTGN.cumsum(1) - 1 + shift_BDGN.gather(1, document_BTGN)
    token_BTG = torch.arange(T, device=device)[:, None].expand(B, T, G)
    rows, starts, start = [], [], 0
    for n, length in enumerate(end_BDN[:, -1].amax(0).clamp_min(1).tolist()):
        slot_BTG = slot_BTGN[..., n].where(here_BTGN[..., n], length)  # one slot more, for all that have none
        token_BLG = token_BTG.new_full((B, length + 1, G), -1).scatter_(1, slot_BTG, token_BTG)[:, :length]
        filled_BLG, token_BLG = token_BLG >= 0, token_BLG.clamp_min(0)
        segment_ids_BL = None
        if segment_ids_BT is not None:
            slot_BL = torch.arange(length, device=device).expand(B, length).contiguous()
            segment_ids_BL = torch.searchsorted(end_BDN[..., n].contiguous(), slot_BL, right=True)
        rows.append(Rows(token_BLG, filled_BLG & writes_BTGN[..., n].gather(1, token_BLG), segment_ids_BL))
        starts.append(start)
        start += length
    return rows, slot_BTGN + torch.tensor(starts, device=device)


def take(x_BTNX: Tensor, index_BLG: Tensor) -> Tensor:
    """[B,L,N,...]: the tokens `index_BLG` of x [B,T,N,...], whose N heads are G of them or G groups."""
    B, T, N = x_BTNX.shape[:3]
    index_BLN = index_BLG.repeat_interleave(N // index_BLG.shape[2], 2)
    flat_BLN = (torch.arange(B, device=x_BTNX.device)[:, None, None] * T + index_BLN) * N
    flat_BLN = flat_BLN + torch.arange(N, device=x_BTNX.device)
    # whole vectors, where gather would take single numbers
    return x_BTNX.flatten(0, 2).index_select(0, flat_BLN.flatten()).unflatten(0, flat_BLN.shape)
