"""A model whose layers are on several devices, played by a CPU, gives the same output as in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from tiny import save_tiny_base
from tiny_models import (
    GREEDY,
    PADDED,
    PADDED_MASK,
    TOKENS,
    assert_same_logits,
    build,
    linearization,
    logits,
    moved_off_start,
)
from two_devices import two_devices

from liger_convert.data.sampling import Sampler
from liger_convert.model import placing
from liger_convert.model.cuda_graphs import capture
from liger_convert.model.decoding import is_spread
from liger_convert.model.loading import linearize_base, load_pretrained
from liger_convert.model.placing import SHARE, place, place_both, waits
from liger_convert.pipeline.layer_selection import Switch
from liger_convert.training.calibrate import calibrate
from liger_convert.utils import device as device_module

MIXERS = ["gla", "gated-deltanet", "mom", "forgetting"]
FAMILIES = ["gemma2", "stablelm", "mixtral"]  # tied embeddings; layers that pass no arguments on; experts


def size(model: Any) -> int:
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


def where(model: Any) -> list[str]:
    """The device of each layer's weights."""
    return [str(next(layer.mlp.parameters()).device) for layer in model.model.layers]


def model_of(family: str, mixer: str) -> Any:
    window = {} if mixer == "forgetting" else {"window": 5, "sinks": 2}
    return build(family, ["main", "softmax", "main"], type=mixer, **window)


def deep_base(family: str, folder: Path) -> Path:
    """A base of eight layers."""
    changes = {"layer_types": ["full_attention", "sliding_attention"] * 4} if family == "gemma2" else {}
    return save_tiny_base(family, folder, tokenizer=False, num_hidden_layers=8, **changes)


def deep(folder: Path, mixer: str = "gla") -> Any:
    plan = linearization(["main", "softmax"] * 4, type=mixer, window=5)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return moved_off_start(linearize_base(folder, plan, **options).eval())


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    with two_devices(monkeypatch) as found:
        monkeypatch.setattr(placing, "gpus_for", lambda device: found)
        yield found


def give(monkeypatch: pytest.MonkeyPatch, devices: list[torch.device], *free: int) -> None:
    """Gives the devices this much free memory for weights."""
    found = {device: int(x / SHARE) for device, x in zip(devices, free, strict=True)}
    monkeypatch.setattr(placing, "free_memory", found.__getitem__)


@pytest.mark.parametrize(
    ("family", "mixer"), [*(("llama", mixer) for mixer in MIXERS), *((family, "gla") for family in FAMILIES)]
)
def test_a_device_map_over_two_devices_does_not_change_the_output(
    family: str, mixer: str, request: pytest.FixtureRequest
) -> None:
    """The first layer is on the second device, and the head apart from the norm before it."""
    whole, options = model_of(family, mixer), GREEDY | {"attention_mask": PADDED_MASK, "max_new_tokens": 8}
    beams = options | {"num_beams": 2}
    expected, text, best = logits(whole, TOKENS), whole.generate(PADDED, **options), whole.generate(PADDED, **beams)
    model = model_of(family, mixer)
    first, second = request.getfixturevalue("devices")
    places = {f"model.{name}": first for name, _ in model.model.named_children() if name != "layers"}
    places |= {"model.layers.0": second, "model.layers.1": second, "model.layers.2": first, "lm_head": first}
    places |= {"model.norm": second}
    dispatch_model(model, places, first, skip_keys=sorted(model._skip_keys_device_placement))
    assert is_spread(model)
    moved = {"attention_mask": PADDED_MASK.to(first)}
    assert_same_logits(logits(model, TOKENS.to(first)).cpu(), expected)
    assert torch.equal(model.generate(PADDED.to(first), **options | moved).cpu(), text)
    assert torch.equal(model.generate(PADDED.to(first), **beams | moved).cpu(), best)


@pytest.mark.parametrize(("rooms", "kept"), [((0.75, 0.75), False), ((0.55, 0.35), True)])
@pytest.mark.parametrize(("family", "mixer"), [("llama", "gla"), ("gemma2", "gla")])
def test_a_model_too_large_for_a_gpu_goes_to_several(
    family: str,
    mixer: str,
    rooms: tuple[float, float],
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """And what no GPU has room for stays in host memory."""
    options = GREEDY | {"attention_mask": PADDED_MASK, "max_new_tokens": 8}
    folder = deep_base(family, tmp_path)
    whole, model = (deep(folder, mixer) for _ in range(2))
    expected, text = logits(whole, TOKENS), whole.generate(PADDED, **options)
    first, second = request.getfixturevalue("devices")
    give(monkeypatch, [first, second], *(int(room * size(model)) for room in rooms))
    place(model, first)
    found = where(model)
    assert found == sorted(found)
    assert {str(first), str(second)} <= set(found)
    assert waits(model) == kept
    told = capsys.readouterr().err
    last = found.count(str(first)) - 1
    assert f"layers 0-{last} on {first}, layers {last + 1}-" in told
    assert ("stay in host memory" in told) == kept
    moved = options | {"attention_mask": PADDED_MASK.to(first)}
    assert_same_logits(logits(model, TOKENS.to(first)).cpu(), expected)
    assert torch.equal(model.generate(PADDED.to(first), **moved).cpu(), text)
    output = model.get_decoder()(TOKENS.to(first), use_cache=False)  # as an evaluation calls it
    assert output.last_hidden_state.device == first


def test_models_on_several_devices_choose_the_same_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The base and the model, whose attentions take each other's places and are calibrated to each other, do not have
    the same layers on the same device."""
    batch = torch.arange(96).view(1, 96) % 101, torch.arange(96)[None]
    folder = deep_base("llama", tmp_path)
    found: list[torch.Tensor] = []

    def measured(device: torch.device) -> None:
        base, model = load_pretrained(folder, dtype=torch.float32), deep(folder)
        base, model = place_both(base, model, device)
        apart.extend(zip(where(base), where(model), strict=True))
        calibrate(model, base, *(x.to(device) for x in batch))
        switch = Switch(base, model, device)
        found.extend(logits(switch.set_softmax(kept), TOKENS.to(device)).cpu() for kept in ([0, 4, 6], [], range(8)))

    apart: list[tuple[str, str]] = []
    measured(torch.device("cpu"))
    assert not torch.equal(found[0], found[1])
    with two_devices(monkeypatch) as (first, second):
        monkeypatch.setattr(placing, "gpus_for", lambda device: [first, second])
        total, rooms = size(deep(folder)), iter((1.1, 1.5, 0.7, 0.8))
        monkeypatch.setattr(placing, "free_memory", lambda device: int(next(rooms) * total / SHARE))
        measured(first)
    one, two = str(first), str(second)
    assert set(apart[8:]) == {(one, one), (one, two), (two, two), (two, "meta")}  # the last is offloaded
    for one, other in zip(found[:3], found[3:], strict=True):
        assert_same_logits(other, one)


def test_a_base_on_several_devices_writes_the_same_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def written(model: Any) -> Any:
        return Sampler(model, 24, 1.0, 1.0)([[1, 5], [1]], [(0, i) for i in range(2)])

    folder = deep_base("llama", tmp_path)
    expected, model = (
        written(load_pretrained(folder, dtype=torch.float32)),
        load_pretrained(folder, dtype=torch.float32),
    )
    with two_devices(monkeypatch) as found:
        monkeypatch.setattr(placing, "gpus_for", lambda device: found)
        give(monkeypatch, found, int(0.6 * size(model)), int(0.6 * size(model)))
        assert is_spread(place(model, found[0]))
        assert (written(model) == expected).all()


def test_processes_and_named_gpus_keep_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    every, named = torch.device("cuda"), torch.device("cuda", 2)
    assert [x.index for x in device_module.gpus_for(every)] == [1, 0, 2]
    assert device_module.gpus_for(named) == [named]
    assert device_module.gpus_for(torch.device("cpu")) == [torch.device("cpu")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert device_module.gpus_for(every) == [every]


def test_a_teacher_beside_a_training_stays_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: list[torch.device]
) -> None:
    model = load_pretrained(deep_base("llama", tmp_path), dtype=torch.float32)
    give(monkeypatch, devices, int(0.7 * size(model)), 10 * size(model))
    place(model, devices[0], taken=1)
    assert waits(model)
    assert not is_spread(model)


def test_a_graph_is_captured_on_the_gpu_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one, where nothing of the step would run."""
    entered: list[Any] = []
    x = torch.ones(1)

    class Entered:
        def __init__(self, tensor: Any):
            entered.append(tensor)

        def __enter__(self) -> None:
            monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)

        def __exit__(self, *_: Any) -> None:
            pass

    def graph() -> Any:
        raise RuntimeError("on that GPU")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: pytest.fail("made on the current GPU"))
    monkeypatch.setattr(torch.cuda, "device_of", Entered)
    with pytest.raises(RuntimeError, match="on that GPU"):
        capture(lambda x: x, (None, x), list)  # type: ignore[arg-type]
    assert torch.equal(entered[0], x)
