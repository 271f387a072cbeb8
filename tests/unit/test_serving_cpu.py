"""What is put right in vLLM on a CPU, on stand-ins for its classes, as few machines have what it goes wrong with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from liger_convert.serving.cpu import spare_generators, take_all_inputs

DROPPED = [True, False, True, False]


class Runner:
    """Draws a number for every request; requests 0 to 2 have a generator of their own."""

    def __init__(self) -> None:
        generators = {i: torch.Generator().manual_seed(i) for i in range(3)}
        self.input_batch = SimpleNamespace(generators=generators, num_reqs=len(DROPPED))
        self.discard_request_mask = SimpleNamespace(np=np.array([*DROPPED, True]))

    def sample_tokens(self) -> list[float]:
        generators = self.input_batch.generators
        return [torch.rand(1, generator=generators.get(i)).item() for i in range(len(DROPPED))]


def first_draw(seed: int) -> float:
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


def test_a_token_that_is_dropped_takes_nothing_from_its_request() -> None:
    stock = Runner()
    assert stock.sample_tokens()[0] == first_draw(0)

    class Mended(Runner):
        pass

    spare_generators(Mended)
    runner = Mended()
    before = dict(runner.input_batch.generators)
    found = runner.sample_tokens()
    assert found[1] == first_draw(1)
    assert runner.input_batch.generators == before
    runner.discard_request_mask.np[:] = False
    found = runner.sample_tokens()
    assert [found[0], found[2]] == [first_draw(0), first_draw(2)]
    assert found[1] != first_draw(1)


class Kernel:
    """A linear map with a routine that takes few inputs, and another one that takes all."""

    linear_method: Any

    def process_weights_after_loading(self, layer: Any) -> None:
        self.linear_method = self._apply_weights_sgl

    def process_weights_for_onednn(self, layer: Any) -> None:
        layer.prepared = True

    def _apply_weights_sgl(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() != 2 or x.dtype == torch.float32:
            raise RuntimeError("mat1 must be a 2D tensor")
        return x @ layer.weight.to(x.dtype)

    def _apply_weights_onednn(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ layer.weight


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> Any:
    """The default dtype while weights are prepared."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], indirect=True)
def test_a_linear_map_in_int8_takes_inputs_of_any_shape(dtype: torch.dtype) -> None:
    layer, x = SimpleNamespace(weight=torch.eye(4, dtype=torch.float32)[:, :3], prepared=False), torch.ones(1, 2, 4)
    stock = Kernel()
    stock.process_weights_after_loading(layer)
    with pytest.raises(RuntimeError):
        stock.linear_method(layer, x)

    class Mended(Kernel):
        pass

    take_all_inputs(Mended)
    kernel = Mended()
    kernel.process_weights_after_loading(layer)
    assert kernel.linear_method(layer, x.to(dtype)).equal(torch.ones(1, 2, 3, dtype=dtype))
    assert layer.prepared == (dtype == torch.float32)
