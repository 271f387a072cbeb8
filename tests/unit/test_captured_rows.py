"""What is captured of a training keeps to the sliding windows of the base, also in layers that stay as they are, and to
the documents of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replays import replayed_on_a_cpu
from safetensors.torch import load_file
from stages import CPU, SEQ_LEN, files_of, folders, make_stage, train
from tiny import tiny_config
from tiny_models import build
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from liger_convert.data.packed_rows import PackedDataset
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


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("align", {}),
        ("align", {"layerwise": True}),
        ("distill", {"mixed_seq_lens": [{"seq_len": SEQ_LEN // 2, "fraction": 0.5}]}),
        ("finetune", {}),
        pytest.param("lora", {}, marks=pytest.mark.slow),
    ],
)
def test_replayed_passes_keep_documents_apart(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with room for too few documents, whose sinks are then missing, the losses are others."""
    only = {"align": {"calibrate": False}, "distill": {}}.get(name, {"loss_on": "all"})
    stage = make_stage(name, steps=3, accumulation=2, **only, **changes)
    plain = train(stage, tmp_path / "plain")
    losses = []
    for out, most in (("replayed", PackedDataset.most_documents), ("few", lambda _: 1)):
        with monkeypatch.context() as patches:
            done = replayed_on_a_cpu(patches)
            patches.setattr(PackedDataset, "most_documents", most)
            losses.append(train(stage, tmp_path / out)["loss"])
        assert done.count("replayed") == 6 * (2 if "layerwise" in changes else 1)
    np.testing.assert_allclose(losses[0], plain["loss"], rtol=1e-5)
    assert np.abs(np.subtract(losses[1], plain["loss"])).max() > 1e-3 * np.max(plain["loss"])
    before, after = (
        {k: v for f in files_of(out) for k, v in load_file(f).items()}
        for out in (tmp_path / "plain", tmp_path / "replayed")
    )
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-5, msg=key)
