"""A batch's metadata: computing it changes no input, and a row's metadata equals that of its shards.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_convert.model.sequence import Positions, SequenceMetadata

T, WINDOW, SINKS = 23, 5, 2
CACHE_WINDOW = WINDOW - 1


def row(kind: str) -> SequenceMetadata:
    given = torch.empty(2, T)
    if kind == "plain":
        return SequenceMetadata.build(given, None, None)
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (3, 9, 11)])[None].expand(2, -1)
        return SequenceMetadata.build(given, positions, None)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :4] = mask[1, 7:9] = 0
    return SequenceMetadata.build(given, None, mask)


def facts(metadata: SequenceMetadata, before: Positions | None) -> dict[str, Any]:
    window = metadata.for_window(CACHE_WINDOW, SINKS, before)
    assert window.sinks is not None
    return {
        "window": window,
        "visible": window.sinks.visible_BTM,
        "write mask": metadata.write_mask_on_eviction(window),
        "after": metadata.positions_after(window, before),
    }


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
@pytest.mark.parametrize("cuts", [[10], [1, 4, 12], list(range(1, T))], ids=str)
def test_a_row_in_shards_is_the_row(kind: str, cuts: list[int]) -> None:
    whole = row(kind)
    expected = facts(whole, None)
    before, visible, masks = None, [], []
    for start, end in zip([0, *cuts], [*cuts, T]):
        part = SequenceMetadata(
            end - start,
            whole.position_BT[:, start:end],
            None if whole.valid_BT is None else whole.valid_BT[:, start:end],
            None if whole.segment_ids_BT is None else whole.segment_ids_BT[:, start:end],
        )
        found = facts(part, before)
        window, halo = found["window"], max(0, start - CACHE_WINDOW)
        assert torch.equal(window.position_BS, whole.position_BT[:, halo:end])
        for name, of_row in (("valid_BS", whole.valid_BT), ("segment_ids_BS", whole.segment_ids_BT)):
            of_shard = getattr(window, name)
            assert of_row is None if of_shard is None else torch.equal(of_shard, of_row[:, halo:end])
        missing = expected["visible"].shape[2] - found["visible"].shape[2]  # sinks of documents that come later
        visible.append(torch.nn.functional.pad(found["visible"], (0, missing)))
        masks.append(found["write mask"])
        before = found["after"]
    assert torch.equal(torch.cat(visible, 1), expected["visible"])
    assert torch.equal(torch.cat(masks, 1), expected["write mask"])
    for name, found, wanted in zip(Positions._fields, before or (), expected["after"]):
        assert torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted, name


def test_building_it_changes_nothing_that_stands_before() -> None:
    first = row("padded")
    before = facts(first, None)["after"]
    copies = [x.clone() if isinstance(x, Tensor) else x for x in before]
    facts(SequenceMetadata.build(torch.empty(2, 3), None, torch.ones(2, 3), before), before)
    for x, copy in zip(before, copies):
        assert torch.equal(x, copy) if isinstance(x, Tensor) else x == copy
