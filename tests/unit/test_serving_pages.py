"""For every mixer, a linearized layer gives the same over pages as over its own cache. No server is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import PAGE_OF, REQUESTS, paged, serve
from tiny_models import SINKS, TOKENS, WINDOW, assert_same_logits, build, logits

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model.attention import head_dims
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.serving import rows as rows_module
from liger_convert.serving.page import PageLayout
from liger_convert.serving.rows import Rows, make_rows
from liger_convert.serving.settings import layouts
from liger_convert.utils.errors import BadInput

# for each step of a server: the requests that take part, and how many tokens of each are read
STEPS = [
    {0: 11, 1: 1, 2: 3},
    {0: 1, 1: 8, 2: 3},
    {3: 11, 0: 1, 2: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {1: 9, 3: 1, 2: 2, 0: 1},
]


def assert_pages_equal_one_pass(**spec: Any) -> None:
    model = build("llama", ["main", "main", "main"], **spec)
    wanted = {r: logits(model, tokens[None])[0] for r, tokens in enumerate(REQUESTS)}
    for r, found in serve(model, paged(model), STEPS).items():
        assert_same_logits(found, wanted[r][: len(found)])


BOUNDED = {"window": WINDOW, "sinks": SINKS}


@pytest.mark.parametrize("mixer", MIXERS)
def test_pages_equal_one_pass(mixer: str) -> None:
    assert_pages_equal_one_pass(type=mixer, **(BOUNDED if mixer != "forgetting" else {"window": WINDOW}))


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "all", **BOUNDED},
        {"forget": True, **BOUNDED},
        {"short_conv": 4, **BOUNDED},
        {"window": 1, "sinks": 0},
        {"window": 1, "sinks": 2},
        {"window": 4, "sinks": 0},
        {"window": 3, "sinks": 8},
    ],
)
def test_pages_equal_one_pass_with_options(options: dict[str, Any]) -> None:
    assert_pages_equal_one_pass(type="gla", **options)


@pytest.mark.parametrize("lost", ["states", "ring", "sinks", "deferred0"])
def test_a_part_of_the_page_that_is_lost_is_seen(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Rows.load

    def lossy(self: Rows, *args: Any) -> Any:
        past = load(self, *args)
        group = past.ring if lost == "deferred0" else getattr(past, lost)
        for name in group if lost != "deferred0" else [n for n in group if n == lost]:
            group[name] = torch.zeros_like(group[name])
        return past

    monkeypatch.setattr(rows_module.Rows, "load", lossy)
    with pytest.raises(AssertionError):
        assert_pages_equal_one_pass(type="gla", **BOUNDED)


def test_a_step_is_one_call_for_all_that_decode_and_for_prompts_of_nearly_equal_length() -> None:
    lengths, seen = [1, 400, 1, 390, 7, 1, 0, 12], [9, 0, 70, 0, 5, 0, 3, 0]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    pages = torch.arange(8) + 20
    found = [(rows.is_new, rows.tokens, (rows.pages_R - 20).tolist()) for rows in make_rows(starts, seen, pages)]
    assert found == [(False, 1, [0, 2]), (False, 7, [4]), (True, 400, [1, 3]), (True, 12, [7, 5])]


def test_layers_of_other_pages_share_what_is_worked_out() -> None:
    (rows,) = make_rows([0, 1, 2], [20, 30], torch.tensor([4, 6]))
    other = rows.on_pages(torch.tensor([5, 1]))
    layout = layouts(build("llama", ["main", "main", "main"], type="gla", **BOUNDED).config, torch.float32)[0]
    assert other.pages_R.tolist() == [5, 1]
    assert rows.pages_R.tolist() == [4, 6]
    assert other.metadata(layout) is rows.metadata(layout)
    assert other.ring(layout.cache_window) is rows.ring(layout.cache_window)


def test_padding_that_counts_as_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module._EndPadded, "position_on_eviction", SequenceMetadata.position_on_eviction)
    with pytest.raises(AssertionError):
        assert_pages_equal_one_pass(type="gla", **BOUNDED)


def test_a_ring_that_ends_with_padding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Rows.__init__

    def unpadded(self: Rows, *args: Any) -> None:
        init(self, *args)
        self.length_R = torch.full_like(self.length_R, self.tokens)

    monkeypatch.setattr(Rows, "__init__", unpadded)
    with pytest.raises(AssertionError):
        assert_pages_equal_one_pass(type="gla", **BOUNDED)


def test_two_requests_on_one_page_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGE_OF, 1, PAGE_OF[0])
    with pytest.raises(AssertionError):
        assert_pages_equal_one_pass(type="gla", **BOUNDED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_page_holds_the_cache_in_its_own_dtypes(mixer: str, dtype: torch.dtype) -> None:
    model = build("llama", ["main", "main", "main"], type=mixer, window=WINDOW)
    for name, parameter in model.named_parameters():
        if ".mixer." not in name:
            parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        cache = model(TOKENS, use_cache=True).past_key_values.layers[0]
    layout = layouts(model.config, dtype)[0]
    fields = {(field.group, field.name): (field.shape, field.dtype) for field in layout.fields}
    kept = {
        (group, name): (tuple(tensor.shape[1:]), tensor.dtype)
        for group in ("states", "ring", "sinks")
        for name, tensor in getattr(cache, group).items()
    }
    assert fields == kept


@pytest.mark.parametrize("mixer", [{"type": "rwkv6", "token_shift": True}, {"type": "forgetting", "kv_shift": True}])
def test_a_mixer_that_shifts_tokens_before_its_window_is_refused_by_name(mixer: dict[str, Any]) -> None:
    config = build("llama", ["main", "softmax", "main"], type="gla").config
    spec = resolve_spec(mixer | {"window": 8})
    with pytest.raises(BadInput, match=rf"'{mixer['type']}': reads part of the previous token"):
        PageLayout(spec, head_dims(config), torch.float32)


def test_a_mixer_whose_cache_grows_is_refused_by_name() -> None:
    model = build("llama", ["main", "softmax", "main"], type="forgetting")
    with pytest.raises(BadInput, match=r"'forgetting'.*its unlimited window"):
        PageLayout(resolve_spec({"type": "forgetting"}), head_dims(model.config), torch.float32)
