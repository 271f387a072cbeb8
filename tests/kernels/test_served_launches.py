"""The steps of a server launch no kernel that the server's warm-up, or its captured decode steps, did not compile.
A layer starts few operations beside them.

Nothing is run: the variants of kernels that would be launched are recorded. Shapes: N tokens of a step, C hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
import gated_kernels  # noqa: E402
import triton.language as tl  # noqa: E402
from launches import Variant, recorded  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

from liger_convert.mixers import resolve_spec  # noqa: E402
from liger_convert.model.attention import LinearizedAttention, head_dims  # noqa: E402
from liger_convert.model.configuration import FORMAT, linearized_config  # noqa: E402
from liger_convert.serving import warm_up as module  # noqa: E402
from liger_convert.serving.batch import Batch, StepMetadata  # noqa: E402
from liger_convert.serving.layer import LayerPages, StepTensors, attend_batch  # noqa: E402
from liger_convert.serving.page import PageLayout  # noqa: E402
from liger_convert.serving.warm_up import WarmUp, steps_of  # noqa: E402

HIDDEN, REQUESTS = 64, 64
CAPTURED = (1, 2, 4, *range(8, REQUESTS + 1, 8))  # requests in the decode steps that vLLM captures
SPECS: dict[str, dict[str, Any]] = {
    "a gate of each code": {"type": "gla", "gate": "pooled"},
    "a gate for each token": {"type": "gla", "forget": True},
    "liger-paper": {"type": "liger-paper"},
    "gated-deltanet": {"type": "gated-deltanet"},
}
Step = list[tuple[int, int]]  # new and earlier tokens of every request

# each of these, or one like it, launched what had not been compiled
STEPS: list[Step] = [
    [*[(1, 500)] * 12, (2036, 0)],
    [(1025, 1), (1023, 0)],
    [(1023, 63), (1024, 0), (1, 0)],
    [(5410, 64), (2782, 0)],
    [(4096, 64), (4096, 0)],
    [*[(1, 40)] * 19, (4097, 0), (4076, 0)],
    [(1280, 1), (3532, 0), (3380, 0)],
    [*[(1, 500)] * 7, (5096, 1), (2428, 0), (661, 0)],
    [(1984, 63), *[(4096, 0)] * 3, (2112, 0)],
    [(963, 63), (15421, 0)],
]


class Served:
    """A layer with the heads of Llama-3-8B, on the meta device."""

    def __init__(self, **spec: Any):
        sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
        base, mixer = LlamaConfig(hidden_size=HIDDEN, **sizes), resolve_spec(spec)
        config = linearized_config(base, {"format": FORMAT, "mixers": {"main": mixer}, "layers": ["main"]})
        self.layer = LinearizedAttention(LlamaAttention(config, 0), config, 0).eval().to("meta")
        self.layout = PageLayout(mixer, head_dims(config), torch.bfloat16)
        self.pages = LayerPages(self.layer, self.layout, torch.empty(1, self.layout.words, device="meta"))
        self.tokens = 16384

    def inputs(self, N: int) -> StepTensors:
        shapes = (HIDDEN,), (32, 128), (8, 128), (8, 128), (128,), (128,)
        return StepTensors(*(torch.empty(1, N, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes))

    def start(self, tokens: int) -> None:
        """What a server does before there are requests, which reads up to so many tokens in a step."""
        self.tokens = tokens
        position_1N = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        WarmUp(self.layout).run(self.layer, self.inputs(tokens), position_1N)
        if self.pages.fused:
            for K in CAPTURED:
                self.run([(1, 100)] * K)

    def run(self, step: Step) -> None:
        self.prepared(step)()

    def prepared(self, step: Step) -> Callable[[], None]:
        """A function that runs the layer, each time as a further layer of the same step."""
        lengths, seen = zip(*step)
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        page_R = torch.zeros(len(step), dtype=torch.long, device="meta")
        inputs, metadata = self.inputs(starts[-1]), StepMetadata(page_R.new_zeros(starts[-1]))
        o_NHD = torch.empty_like(inputs.q_1NHD[0])
        batch = Batch(starts, seen, page_R, page_R, self.tokens)
        return lambda: attend_batch(self.layer, self.pages, batch, inputs, metadata, o_NHD)


def random_steps(tokens: int, count: int) -> Iterator[Step]:
    """Requests that decode, perhaps the next part of a prompt, then prompts, of which the last may be cut."""
    choose = random.Random(tokens)
    for _ in range(count):
        longest = choose.choice((40, 400, 1024, 4096, 100_000))
        step = [(1, choose.choice((1, 64, 5000))) for _ in range(choose.choice((0, 0, choose.randrange(1, 40))))]
        left = tokens - len(step)
        if choose.random() < 0.5:
            step.append((choose.randint(2, min(left, longest)), choose.choice((1, 63, 64, tokens))))
            left -= step[-1][0]
        for _ in range(choose.randrange(REQUESTS - len(step)) if longest < 100_000 or not step else 1):
            if left:
                step.append((min(left, choose.choice((longest, choose.randint(1, longest)))), 0))
                left -= step[-1][0]
        yield step or [(1, 0)]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    before = gated_kernels.in_use()
    gated_kernels.use("triton")
    yield
    gated_kernels.use(before)


def not_compiled(tokens: int, spec: dict[str, Any], count: int) -> set[Variant]:
    """What some fixed and `count` random steps launch beyond what a server that starts launches."""
    fitting = [step for step in STEPS if sum(new for new, _ in step) <= tokens]
    with torch.no_grad():
        with recorded() as at_start:
            served = Served(**spec)
            served.start(tokens)
        assert len({name for name, *_ in at_start}) > 3
        with recorded() as later:
            for step in [*fitting, *random_steps(tokens, count)]:
                served.run(step)
    return later - at_start


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_requests_launch_only_what_the_start_has_compiled(tokens: int) -> None:
    assert not not_compiled(tokens, {"type": "gla"}, 15)


@pytest.mark.parametrize("spec", SPECS)
def test_so_do_those_of_other_mixers(spec: str) -> None:
    assert not not_compiled(8192, SPECS[spec], 5)


@pytest.mark.slow  # a third of a minute each
@pytest.mark.parametrize("tokens", [2048, 8192, 16384])
def test_hundreds_of_steps_launch_only_what_the_start_has_compiled(tokens: int) -> None:
    assert not not_compiled(tokens, {"type": "gla"}, 300)


def test_a_warm_up_of_one_step_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "steps_of", lambda *args: steps_of(*args)[:1])
    assert not_compiled(2048, {"type": "gla"}, 0)


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


# Before they were made fewer: 127, 119 and 259. A prompt that a GPU reads waits for the host to start them.
@pytest.mark.parametrize(
    ("step", "most"),
    [([(1024, 0)], 52), ([(1024, 1024)], 58), ([(1, 500), (1, 40), (1, 700), (600, 0), (400, 0)], 140)],
    ids=["a prompt", "the rest of a prompt", "two prompts beside decoding requests"],
)
@torch.no_grad()
def test_a_layer_starts_few_operations_for_prompts(step: Step, most: int) -> None:
    with recorded():
        run = Served(type="gla").prepared(step)
        run()  # what the layers of a step share is computed by the first
        with Operations() as started:
            run()
    assert 20 < started.count <= most


@triton.jit
def usual(x, T, C: tl.constexpr):
    pass


@triton.jit(do_not_specialize=["T"])
def general(x, T, C: tl.constexpr):
    pass


def test_a_record_tells_what_triton_compiles_again() -> None:
    x = torch.empty(32, device="meta")
    calls = [(x, 1, 2), (x, 2, 2), (x, 17, 2), (x, 16, 2), (x, 32, 2), (x, 32, 4), (x[1:], 32, 2), (x[4:], 32, 2)]
    calls += [(None, 32, 2)]
    for kernel, count in ((usual, 6), (general, 4)):
        with recorded() as found:
            for *args, C in calls:
                kernel[(1,)](*args, C=C)
        assert len(found) == count
