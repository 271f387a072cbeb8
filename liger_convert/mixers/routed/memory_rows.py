"""Gathers, for each memory, only the tokens that write or read it, so that its scan skips all others.

A memory does not change at a token that neither writes nor reads it, so its row omits that token. Each head chooses
separately, so a slot of a row can hold a different token for each head. A scan has one segment id per slot for all
heads. A document of a packed row therefore starts at the same slot for all heads: after the previous document's last
slot in any head.

Shapes: B batch, T tokens, H query heads, G key-value heads, N memories, D documents, L slots of all memories' rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_convert.mixers.base import QKV, MemoryOutput


class MemoryRows(NamedTuple):
    """The rows of all memories, concatenated.

    lengths: of each memory's row. token_BLG: the token in each slot, arbitrary in an empty one. written_BLG: whether it
    is written to the memory. segment_ids_BL: its document; None if each row is one document. slot_BTGN: the slot of a
    token in the row of each memory that it reads or writes, counted from the start of the first row.
    """

    lengths: list[int]
    token_BLG: Tensor
    written_BLG: Tensor
    segment_ids_BL: Tensor | None
    slot_BTGN: Tensor

    def queries(self, qkv: QKV) -> list[QKV]:
        """For each memory, the queries, keys and values of its tokens.

        Positions and layer inputs are left empty, as they are not per head; what is empty already stays so.
        """
        values = qkv.v_BSGD[:, -self.slot_BTGN.shape[1] :]
        of_tokens = qkv.q_BTHD, qkv.k_BTGD, qkv.q_rot_BTHD, qkv.k_rot_BTGD, values
        parts = [self._split(x if x.shape[1] == 0 else take(x, self.token_BLG)) for x in of_tokens]
        left_out = {"position_BS": qkv.position_BS[:, :0], "x_BTC": qkv.x_BTC[:, :0]}
        return [QKV(*part, **left_out) for part in zip(*parts, strict=True)]

    def entries(self, entries: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """For each memory, the entries of its tokens; zeros for tokens that are not written."""
        parts = [self._split(take(x_BTGX, self.token_BLG, ~self.written_BLG)) for x_BTGX in entries]
        return list(zip(*parts, strict=True))

    def segment_ids(self) -> Sequence[Tensor | None]:
        return [None] * len(self.lengths) if self.segment_ids_BL is None else self._split(self.segment_ids_BL)

    def reads(self, memories: list[MemoryOutput], index_BTGK: Tensor) -> list[MemoryOutput]:
        """Each token's reads of its K memories, as one MemoryOutput per choice."""
        joined = [None if x[0] is None else torch.cat(x, 1) for x in zip(*memories, strict=True)]
        found = []
        for slot_BTG in self.slot_BTGN.gather(-1, index_BTGK).unbind(-1):
            read_BTHV, *normalizers = (None if x is None else take(x, slot_BTG) for x in joined)
            assert read_BTHV is not None
            found.append(MemoryOutput(read_BTHV, *normalizers))
        return found

    def _split(self, x_BLX: Tensor) -> Sequence[Tensor]:
        return x_BLX.split(self.lengths, 1) if x_BLX.shape[1] else [x_BLX] * len(self.lengths)


def make_rows(writes_BTGN: Tensor, reads_BTGN: Tensor, segment_ids_BT: Tensor | None) -> MemoryRows:
    """Rows of the tokens that are true in `writes_BTGN` or `reads_BTGN`, in order.

    Their lengths are read from the device. `segment_ids_BT` number the documents from 0; None if each row is one.
    """
    B, T, G, N = writes_BTGN.shape
    device, here_BTGN = writes_BTGN.device, writes_BTGN | reads_BTGN
    document_BT = torch.zeros(B, T, device=device) if segment_ids_BT is None else segment_ids_BT
    documents = 1 if segment_ids_BT is None else int(segment_ids_BT.max()) + 1
    document_BTGN = document_BT.long()[:, :, None, None].expand_as(here_BTGN)
    count_BDGN = torch.zeros(B, documents, G, N, dtype=torch.long, device=device)
    count_BDGN.scatter_add_(1, document_BTGN, here_BTGN.long())
    end_BDN = count_BDGN.amax(2).cumsum(1)
    # the slot where a document starts, minus the number of tokens from earlier documents in the row
    shift_BDGN = F.pad(end_BDN, (0, 0, 1, -1))[:, :, None] - F.pad(count_BDGN.cumsum(1), (0, 0, 0, 0, 1, -1))
    slot_BTGN = here_BTGN.cumsum(1) - 1 + shift_BDGN.gather(1, document_BTGN)

    # a row has at least one slot, as the ops do not accept empty rows
    lengths = end_BDN[:, -1].amax(0).clamp_min(1).tolist()
    L, start_N = sum(lengths), torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
    slot_BTGN = slot_BTGN + start_N
    token_BTGN = torch.arange(T, device=device)[:, None, None].expand_as(slot_BTGN)
    # one extra slot for all tokens that are not in the row
    owner_BLG = token_BTGN.new_full((B, L + 1, G), -1)
    place_BTGN = slot_BTGN.where(here_BTGN, L)
    by_memory = [x.permute(0, 3, 1, 2).flatten(1, 2) for x in (place_BTGN, token_BTGN)]
    owner_BLG = owner_BLG.scatter_(1, *by_memory)[:, :L]
    token_BLG, memory_L = (
        owner_BLG.clamp_min(0),
        torch.arange(N, device=device).repeat_interleave(torch.tensor(lengths, device=device), output_size=L),
    )
    written_BLG = writes_BTGN.permute(0, 3, 1, 2).flatten(1, 2).gather(1, memory_L[:, None] * T + token_BLG)
    segment_ids_BL = None
    if segment_ids_BT is not None:
        ends = (end_BDN + start_N).unbind(-1)
        slots = torch.arange(L, device=device).expand(B, L).split(lengths, 1)
        found = [torch.searchsorted(end.contiguous(), x.contiguous(), right=True) for end, x in zip(ends, slots)]
        segment_ids_BL = torch.cat(found, 1)
    return MemoryRows(lengths, token_BLG, written_BLG & (owner_BLG >= 0), segment_ids_BL, slot_BTGN)


def make_joined_row(writes_BT1N: Tensor, reads_BT1N: Tensor, segment_ids_BT: Tensor | None, most: int) -> MemoryRows:
    """One row for all memories, each a segment of its own, if all heads share one choice.

    A token belongs to at most `most` memories, so the length T * most is enough, and no value is read from the device.
    """
    B, T, _, N = writes_BT1N.shape
    device, L = writes_BT1N.device, T * most
    here_BX, writes_BX = (x.transpose(1, 3).flatten(1) for x in (writes_BT1N | reads_BT1N, writes_BT1N))  # X = N T
    slot_BX = here_BX.cumsum(1) - 1
    owner_BL = slot_BX.new_full((B, L + 1), -1)  # one extra slot for all tokens that are not in the row
    owner_BL = owner_BL.scatter_(1, slot_BX.where(here_BX, L), torch.arange(N * T, device=device).expand(B, -1))[:, :L]
    filled_BL, owner_BL = owner_BL >= 0, owner_BL.clamp_min(0)
    token_BL = owner_BL % T
    segment_ids_BL = owner_BL // T
    if segment_ids_BT is not None:
        segment_ids_BL = segment_ids_BL * T + segment_ids_BT.gather(1, token_BL)
    written_BL1 = (filled_BL & writes_BX.gather(1, owner_BL))[..., None]
    slot_BT1N = slot_BX.unflatten(1, (N, T)).transpose(1, 2)[:, :, None]
    return MemoryRows([L], token_BL[..., None], written_BL1, segment_ids_BL, slot_BT1N)


def take(x_BTNX: Tensor, index_BLG: Tensor, left_out_BLG: Tensor | None = None) -> Tensor:
    """The tokens `index_BLG` of x [B,T,N,...], as [B,L,N,...], with N heads in G groups; zeros for those left out."""
    B, T, N = x_BTNX.shape[:3]
    index_BLN = _per_head(index_BLG, N)
    flat_BLN = (torch.arange(B, device=x_BTNX.device)[:, None, None] * T + index_BLN) * N
    flat_BLN = flat_BLN + torch.arange(N, device=x_BTNX.device)
    # copies whole vectors, where gather would copy single numbers
    found = x_BTNX.flatten(0, 2).index_select(0, flat_BLN.flatten())
    if left_out_BLG is not None:
        found = found.masked_fill_(_per_head(left_out_BLG, N).flatten()[:, None], 0)
    return found.view(*flat_BLN.shape, *found.shape[1:])


def _per_head(x_BLG: Tensor, heads: int) -> Tensor:
    return x_BLG.repeat_interleave(heads // x_BLG.shape[2], 2)
