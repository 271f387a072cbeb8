"""For every mixer, a linearized layer gives the same over pages as over its own cache. No server is needed."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from paged import MOST, PAGE_OF, REQUESTS, paged, serve
from tiny_models import SINKS, TOKENS, WINDOW, assert_same_logits, build, logits
from torch.utils._python_dispatch import TorchDispatchMode

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model.attention import head_dims
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.serving import rows as rows_module
from liger_convert.serving.page import PageLayout
from liger_convert.serving.rows import Rows, fewest_calls, make_rows
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
    found = [(rows.is_new, rows.tokens, (rows.pages_R - 20).tolist()) for rows in make_rows(starts, seen, pages, MOST)]
    assert found == [(False, 1, [0, 2]), (False, 7, [4]), (True, 400, [1, 3]), (True, 12, [7, 5])]


@pytest.mark.parametrize("call", [0, 3, 16, 10_000])
@pytest.mark.parametrize("most", [12, 60, 10_000])
def test_prompts_are_read_in_the_calls_that_cost_least(call: int, most: int) -> None:
    """Beside every way to divide them that pads no call beyond what it may have."""
    choose = random.Random(call + most)
    for _ in range(50):
        lengths = sorted(choose.choices((1, 2, 3, 5, 9, 10, 11, 20), k=choose.randint(0, 7)), reverse=True)
        found = fewest_calls(lengths, call, most)
        assert [length for rows in found for length in lengths[rows]] == lengths
        costs = []
        for cuts in itertools.product((False, True), repeat=max(len(lengths) - 1, 0)):
            bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
            calls = [lengths[a:b] for a, b in pairwise(bounds) if a < b]
            if all(rows[0] == rows[-1] or rows[0] * len(rows) <= most for rows in calls):
                costs.append(sum(call + rows[0] * len(rows) for rows in calls))
        assert sum(call + lengths[rows][0] * len(lengths[rows]) for rows in found) == min(costs)


@pytest.mark.parametrize("call", [0, 10_000])
def test_pages_equal_one_pass_however_prompts_are_divided_into_calls(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "CALL_CPU", call)
    calls = [len(make_rows([0, 11, 12, 15], [0, 0, 0], torch.arange(3), MOST))]
    assert calls == [1 if call else 3]
    assert_pages_equal_one_pass(type="gla", **BOUNDED)
    assert_pages_equal_one_pass(type="gated-deltanet", **BOUNDED)


def test_layers_of_other_pages_share_what_is_worked_out() -> None:
    (rows,) = make_rows([0, 1, 2], [20, 30], torch.tensor([4, 6]), MOST)
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
        self.length_R, self._lengths = torch.full_like(self.length_R, self.tokens), [self.tokens] * len(self._lengths)

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


def test_rows_name_the_tokens_that_masks_would_find() -> None:
    for lengths, seen in (([7, 2, 5], [0, 0, 0]), ([7, 7], [3, 9]), ([1, 9, 4], [6, 1, 20]), ([3], [2])):
        starts = [sum(lengths[:r]) + 2 * r for r in range(len(lengths))]
        rows = Rows(starts, lengths, seen, list(range(len(lengths))), torch.arange(len(lengths)))
        length_R1, seen_R1 = torch.tensor(lengths)[:, None], torch.tensor(seen)[:, None]
        index_T = torch.arange(rows.tokens)
        is_real_RT = index_T < length_R1
        for size in (1, 3, 4, 12):
            kept_RT = is_real_RT & (index_T >= length_R1 - size)
            row_K, index_K = kept_RT.nonzero().unbind(1)
            ring = rows.ring(size)
            assert ring.row_K.flatten().equal(row_K)
            assert ring.slot_K.flatten().equal(((seen_R1 + index_T) % size)[kept_RT])
            assert (ring.token_K is None) == is_real_RT.all()
            if ring.token_K is not None:
                assert ring.token_K.equal(row_K * rows.tokens + index_K)
        x_RTC, into = torch.randn(len(lengths), rows.tokens, 4), torch.zeros(starts[-1] + lengths[-1] + 1, 4)
        rows.put(into, x_RTC)
        for r, (start, length) in enumerate(zip(starts, lengths)):
            assert into[start : start + length].equal(x_RTC[r, :length])
        assert int(into.any(1).sum()) == sum(lengths)


class NoReading(TorchDispatchMode):
    """Raises when an operation needs a value on the host, for which a GPU would finish all else first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select")), func
        if "index" in str(func) and len(args) > 1 and isinstance(args[1], (list, tuple)):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), f"{func} with a mask"
        if "repeat_interleave" in str(func):
            assert (kwargs or {}).get("output_size") is not None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seen", [[0, 0], [2, 20], [30, 40]])
def test_rows_read_nothing_on_the_host(seen: list[int]) -> None:
    layout = layouts(build("llama", ["main"] * 3, type="gla", **BOUNDED).config, torch.float32)[0]
    views = layout.views(torch.zeros(2, layout.words))
    x_1NC = torch.randn(1, 16, 8)
    with NoReading():
        for lengths in ([9, 6], [8, 8]):
            rows = Rows([0, lengths[0]], lengths, seen, [0, 1], torch.arange(2))
            past, metadata = rows.load(layout, views), rows.metadata(layout)
            metadata.write_mask_on_eviction(metadata.for_window(layout.cache_window, layout.sinks, past.positions))
            for field, kept in views:
                size = rows.tokens if field.group == "ring" else kept.shape[1]
                new = torch.randn(2, size, *kept.shape[2:])
                (past.new if field.group == "ring" else getattr(past, field.group))[field.name] = new
            rows.store(layout, views, past)
            rows.put(x_1NC[0], rows.take(x_1NC))
        with pytest.raises(AssertionError, match="with a mask"):
            x_1NC[x_1NC > 0]


FORK = """
import faulthandler, os, sys, torch
from liger_convert.mixers import resolve_spec
from liger_convert.mixers.base import HeadDims
from liger_convert.serving.page import PageLayout
torch.set_num_threads(4)
made = resolve_spec({"type": "gla", "window": 64}), HeadDims(hidden=512, heads=8, kv_heads=8, dim=64), torch.float32
PageLayout(*made)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
faulthandler.dump_traceback_later(20, exit=True)
PageLayout(*made)
os._exit(0 if torch.get_num_threads() == 4 else 3)
"""


def test_a_process_forked_after_a_layout_was_made_makes_it_again() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0
