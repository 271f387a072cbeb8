"""Requests that decode in a server run the fused step on their pages, as a captured step runs again and again.

Shapes: N pages, K rows of decoding requests, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from gated_kernels.common.registry import set_kernel
from gated_kernels.fused_step import triton as kernels
from paged import MOST, PAGE_OF, REQUESTS, PagedAttention, attend, paged, serve, start_step
from tiny_models import SINKS, WINDOW, assert_same_logits, build, logits
from torch.utils._python_dispatch import TorchDispatchMode

from liger_convert.serving.batch import Batch, StepMetadata
from liger_convert.serving.layer import LayerPages
from liger_convert.serving.settings import layouts, why_not_captured

GLA = {"type": "gla", "window": WINDOW, "sinks": SINKS, "codes": 16}
SPECS = {
    "gla": GLA,
    "a ring as long as the sinks": GLA | {"window": 4, "sinks": 3},
    "more sinks than the window": GLA | {"window": 3, "sinks": 7},
    "liger-paper": {"type": "liger-paper", "window": WINDOW},
}
# two new requests of one token, prompts beside decoding requests, and steps in which all decode
STEPS = [{0: 1, 1: 7, 2: 2}, {0: 1, 2: 1, 1: 3}, {2: 1, 1: 1, 0: 1}, {3: 1, 0: 1}, *[{3: 1, 2: 1, 1: 1, 0: 1}] * 2]
READS_ON_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "equal.default")


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    set_kernel("fused_step", kernels.triton_fused_step)
    yield
    set_kernel("fused_step", None)


def served(**spec: Any) -> tuple[Any, list[PagedAttention], dict[int, Tensor]]:
    """A model with paged layers, and the logits of its requests in one pass each."""
    model = build("llama", ["main"] * 3, **spec)
    wanted = {r: logits(model, tokens[None])[0] for r, tokens in enumerate(REQUESTS)}
    layers = paged(model)
    assert all(layer.pages.fused for layer in layers)
    for layer in layers[1:]:  # one is enough, and the interpreter is slow
        layer.pages.fused = False
    return model, layers, wanted


def check(found: dict[int, Tensor], wanted: dict[int, Tensor]) -> None:
    for r, of_request in found.items():
        assert_same_logits(of_request, wanted[r][: len(of_request)])


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_on_pages_equals_one_pass(spec: str) -> None:
    model, layers, wanted = served(**SPECS[spec])
    rows = []

    def watched(token: Any, *args: Any) -> Tensor:
        rows.append(len(token.q_BHD))
        return kernels.triton_fused_step(token, *args)

    set_kernel("fused_step", watched)
    check(serve(model, layers, STEPS), wanted)
    assert rows == [1, 2, 3, 2, 4, 4]


def test_a_page_that_is_not_cleared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPages, "clear", lambda *args: None)
    model, layers, wanted = served(**GLA)
    with pytest.raises(AssertionError):
        check(serve(model, layers, STEPS), wanted)


def test_a_lost_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    step_cache = LayerPages.step_cache

    def lossy(self: LayerPages, *args: Any) -> Any:
        cache = step_cache(self, *args)
        assert cache is not None
        return cache._replace(state_NGFD=torch.zeros_like(cache.state_NGFD))

    model, layers, wanted = served(**GLA)
    monkeypatch.setattr(LayerPages, "step_cache", lossy)
    with pytest.raises(AssertionError):
        check(serve(model, layers, STEPS), wanted)


class NoReading(TorchDispatchMode):
    """Raises when an operation gives the host a value, as a capture does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in READS_ON_HOST), f"{func} reads a value on the host"
        return func(*args, **(kwargs or {}))


def test_a_captured_step_reads_nothing_on_the_host() -> None:
    set_kernel("fused_step", lambda token, cache, config: torch.zeros_like(token.q_BHD))  # the interpreter reads
    model, layers, _ = served(**GLA)
    for layer in layers:
        layer.pages.fused = True
    start_step(layers, [1, 1, 1, 0], [6, 0, 9, 0], [4, 2, 6, 0])
    positions, tokens = torch.tensor([6, 0, 9, 3]), torch.tensor([[5, 6, 7, 8]])
    with NoReading():
        logits(model, tokens, position_ids=positions[None], metadata=StepMetadata(positions))
        with pytest.raises(AssertionError, match="on the host"):
            positions[0].item()


@pytest.mark.parametrize("spec", ["gla", "liger-paper"])
@torch.no_grad()
def test_a_captured_step_runs_again_with_what_its_buffers_then_hold(spec: str) -> None:
    """A batch of four rows, as it was captured, replays steps of fewer requests; `Rows` takes the same step by step."""
    model, (layer, *_), _ = served(**SPECS[spec])
    random = torch.Generator().manual_seed(3)

    def run(pages: LayerPages, batch: Batch, x_1KC: Tensor, position_K: Tensor) -> Tensor:
        angles = model.model.rotary_emb(x_1KC, position_K[None])
        return attend(layer, pages, batch, x_1KC, angles, StepMetadata(position_K))

    def new_inputs(tokens: int) -> Tensor:
        return torch.randn(1, tokens, model.config.hidden_size, generator=random)

    ours, seen = layer.pages, {0: 8, 1: 3, 2: 1}
    ours.pages.zero_()
    lengths, page_R = list(seen.values()), torch.tensor([PAGE_OF[r] for r in seen])
    prompts = Batch([0, 8, 11, 12], [0, 0, 0], page_R, torch.zeros(3, dtype=torch.long), MOST)
    run(ours, prompts, new_inputs(12), torch.cat([torch.arange(n) for n in lengths]))
    plain = LayerPages(layer, ours.layout, ours.pages.clone())
    plain.fused = False
    page_K, seen_K, position_K = (torch.zeros(4, dtype=torch.long) for _ in range(3))
    captured = Batch([0, 1, 2, 3, 4], [0, 0, 0, 0], page_K, seen_K, MOST)
    for requests in [[2, 0, 1], [1], [0, 2], [1, 2, 0]]:
        count = len(requests)
        page_K.copy_(torch.tensor([PAGE_OF[r] for r in requests] + [0] * (4 - count)))
        seen_K.copy_(torch.tensor([seen[r] for r in requests] + [-1] * (4 - count)))
        position_K[:count] = seen_K[:count]  # an engine leaves the others as they are
        x_1KC = new_inputs(4)
        found = run(ours, captured, x_1KC, position_K)
        step = Batch(
            range(count + 1), [seen[r] for r in requests], page_K[:count].clone(), seen_K[:count].clone(), MOST
        )
        wanted = run(plain, step, x_1KC[:, :count], position_K[:count])
        assert found.isfinite().all()
        torch.testing.assert_close(found[:count], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.pages[1:], plain.pages[1:], rtol=1e-4, atol=1e-5)
        for r in requests:
            seen[r] += 1


def test_layers_of_other_pages_share_their_rows() -> None:
    first = Batch([0, 1, 2, 7], [4, 9, 0], torch.tensor([3, 1, 2]), torch.tensor([4, 9, 0]), MOST)
    other = first.on_pages(torch.tensor([6, 5, 4]))
    assert (first.decoding, other.decoding) == (2, 2)
    assert [rows.pages_R.tolist() for rows in other.rows(True)] == [[4]]
    assert [rows.pages_R.tolist() for rows in first.rows(True)] == [[2]]
    assert [rows.pages_R.tolist() for rows in other.rows(False)] == [[6, 5], [4]]
    assert other.rows(True)[0].seen_R is first.rows(True)[0].seen_R
    new_pages = other.new_pages()
    assert new_pages is not None
    assert new_pages.tolist() == [4]


def test_layouts_do_not_depend_on_the_dtype_that_a_server_builds_models_in() -> None:
    config = build("llama", ["main"] * 3, **GLA).config
    torch.set_default_dtype(torch.bfloat16)
    try:
        layout = layouts(config, torch.bfloat16)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert layout.has_fused_step
    assert layout.words == layouts(config, torch.bfloat16)[0].words


def test_padding_decodes_only_where_all_requests_do() -> None:
    pages = torch.zeros(3, dtype=torch.long)
    assert Batch([0, 1, 2, 2], [4, 9, 0], pages, pages, MOST).decoding == 3
    assert Batch([0, 1, 4, 4], [4, 9, 0], pages, pages, MOST).decoding == 1


@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        (GLA, {}, None),
        ({"type": "liger-paper"}, {}, None),
        ({"type": "gated-deltanet"}, {}, "mixer 'gated-deltanet' has no fused decode step"),
        (GLA | {"forget": True}, {}, "mixer 'gla' has no fused decode step"),
        (GLA, {"rope_parameters": {"rope_type": "dynamic"}}, "the longest request"),
    ],
)
def test_it_says_why_decoding_is_not_captured(
    spec: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    config = build("llama", ["main", "softmax", "main"], **spec).config
    of_layers = layouts(config, torch.bfloat16)
    for name, value in changes.items():
        setattr(config, name, value)
    found = why_not_captured(config, of_layers)
    assert found is None if reason is None else reason in str(found)
