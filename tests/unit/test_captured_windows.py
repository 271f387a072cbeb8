"""What is captured of a training keeps to the sliding windows of the base, also in layers that stay as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from replays import replayed_on_a_cpu
from stages import CPU, SEQ_LEN, folders, make_stage, train
from tiny import tiny_config
from tiny_models import build
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from liger_convert.model import sequence
from liger_convert.model.families import FAMILIES
from liger_convert.model.loading import load_base
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.training.capture import APART, MASKLESS, attend_within_one_document

SLIDING = [
    name
    for name, family in FAMILIES.items()
    if getattr(tiny_config(name), "sliding_window", None) and not family.softcap  # whose attention is not captured
]


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("linear", [False, True])
def test_a_row_of_one_document_is_read_as_with_transformers_masks(
    family: str, linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without windows, the base's logits are others."""
    base = load_base(folders(family)[0], CPU, torch.float32)
    model, row_1T = build(family, type="gla", window=5, sinks=2) if linear else base, torch.arange(3, 63)[None]
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = model(row_1T, use_cache=False).logits
        model.set_attn_implementation(MASKLESS)
        found = model(row_1T, use_cache=False).logits
        monkeypatch.setitem(AttentionInterface._global_mapping, MASKLESS, sdpa_attention_forward)
        without = model(row_1T, use_cache=False).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert linear or (without - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.softcap])
@pytest.mark.parametrize("linear", [False, True])
def test_rows_of_several_documents_are_read_as_with_transformers_masks(
    family: str, linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have their documents at different places. The control: as one document, they are read otherwise."""
    base = load_base(folders(family)[0], CPU, torch.float32)
    model = build(family, type="gla", window=5, sinks=2) if linear else base
    ids_BT = torch.arange(3, 63).view(2, 30)
    position_ids_BT = torch.stack([torch.cat([torch.arange(n) for n in sizes]) for sizes in ((1, 9, 20), (17, 13))])
    given = {"input_ids": ids_BT, "position_ids": position_ids_BT, "use_cache": False}
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = model(**given).logits
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)  # it reads values on the host
        monkeypatch.setattr(sequence, "find_packed_sequence_indices", None)
        known = {"metadata": SequenceMetadata.build(ids_BT, position_ids_BT, None, most_documents=3)} if linear else {}
        model.set_attn_implementation(APART)
        found = model(**given, **known).logits
        model.set_attn_implementation(MASKLESS)
        as_one = model(**given, **known).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert linear or (as_one - expected).abs().max() > 1e-3 * expected.abs().max()


def test_a_window_that_holds_the_row_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    monkeypatch.setattr(
        "liger_convert.training.capture.sdpa_attention_forward", lambda *given, **options: masks.append(given[4])
    )
    x = torch.zeros(1, 2, 6, 4)
    for window in (None, 6, 5):
        attend_within_one_document(torch.nn.Module(), x, x, x, None, sliding_window=window)
    assert masks[:2] == [None, None]
    assert masks[2].sum() == 20  # of 21 pairs, the first token is hidden from the last


@pytest.mark.parametrize("family", ["mistral", "ministral"])
def test_replayed_passes_train_as_plain_ones(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of the base is shorter than the rows, in all of its layers or in some."""
    assert tiny_config(family).sliding_window < SEQ_LEN
    stage = make_stage("distill", steps=2, concat_documents=True)
    plain = train(stage, tmp_path / "plain", family=family)
    with monkeypatch.context() as patches:
        done = replayed_on_a_cpu(patches)
        replayed = train(stage, tmp_path / "replayed", family=family)
    assert done.count("replayed") == 2
    np.testing.assert_allclose(replayed["loss"], plain["loss"], rtol=1e-5)
