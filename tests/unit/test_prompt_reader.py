"""Graphs that read prompts are used only while they give what the model gives. On a CPU, a graph is a list of recorded
operations."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from recorded_ops import graphs_on_a_cpu
from tiny_models import GREEDY, TOKENS, WINDOW, assert_same_logits, build
from torch import nn
from transformers import DynamicCache

from liger_convert.model import prompt_graphs, set_branches
from liger_convert.model.module_snapshot import ModuleSnapshot

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
CHUNK = 8


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(prompt_graphs, "STEP", 3)
    return graphs_on_a_cpu(monkeypatch)


@pytest.fixture
def model() -> Any:
    model = build("llama", type="gla", window=WINDOW, sinks=2)
    model.prefill_chunk = CHUNK
    return model


def read(model: Any, ids: Any = TOKENS, cache: Any = None, graphs: bool = True, **options: Any) -> torch.Tensor:
    """[B,V]: the logits after a prompt."""
    cache = DynamicCache() if cache is None else cache
    own = model.get_base_model() if isinstance(model, PeftModel) else model
    with torch.no_grad(), own.model.prompts.disabled(not graphs):
        logits: torch.Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **options).logits
    return logits[:, -1]


def record_all(model: Any, done: list[str]) -> None:
    """Reads prompts until nothing is left to record."""
    for _ in range(2):
        read(model)
    done.clear()
    read(model)
    assert set(done) == {"replayed"}


def assert_as_without(model: Any, *args: Any, **options: Any) -> None:
    assert_same_logits(read(model, *args, **options), read(model, *args, graphs=False, **options))


@pytest.mark.parametrize("padding", [1, 4, 5, 11, 20])
def test_a_padded_batch_is_read_as_without_graphs(padding: int, model: Any, done: list[str]) -> None:
    record_all(model, done)
    mask = torch.ones_like(TOKENS)
    mask[0, :padding] = 0  # the first chunk has 5 tokens
    ids = TOKENS * mask
    options = GREEDY | {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    done.clear()
    graphs = model.generate(ids, attention_mask=mask, **options)
    assert "replayed" in done
    plain = model.generate(ids, attention_mask=mask, disable_compile=True, **options)
    assert torch.equal(graphs.sequences, plain.sequences)
    assert_same_logits(torch.stack(graphs.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("tokens", [2, 3, 4, 7, 8, 9, 16, 17, 29])
def test_prompts_of_any_length_share_the_graphs_of_few(tokens: int, model: Any, done: list[str]) -> None:
    for number in range(3):
        assert_as_without(model, TOKENS.roll(number, 1)[:, :tokens])
    assert "recorded" in done
    done.clear()
    assert_as_without(model, TOKENS[:, : -(-tokens // 3) * 3 - 1] if tokens < CHUNK else TOKENS[:, :tokens])
    assert set(done) == {"replayed"}


def test_a_cache_keeps_its_prompt_when_others_are_read(model: Any, done: list[str]) -> None:
    record_all(model, done)
    caches, plain = [DynamicCache() for _ in range(2)], DynamicCache()
    read(model, TOKENS, caches[0])
    read(model, TOKENS.flip(1), caches[1])
    read(model, TOKENS, plain, graphs=False)
    follow_up = TOKENS[:, :11]  # 3 tokens, which no graph takes behind others, and a chunk
    found, wanted = read(model, follow_up, caches[0]), read(model, follow_up, plain, graphs=False)
    assert_same_logits(found, wanted)
    assert not torch.allclose(read(model, follow_up, caches[1]), wanted, rtol=1e-2)


def test_a_prompt_goes_on_after_decoding(model: Any, done: list[str]) -> None:
    record_all(model, done)
    options = GREEDY | {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for disable in (False, True):
        first = model.generate(TOKENS, disable_compile=disable, **options)
        text = torch.cat((first.sequences, TOKENS[:, :17]), 1)
        found.append(model.generate(text, past_key_values=first.past_key_values, disable_compile=disable, **options))
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert_same_logits(torch.stack(found[0].logits), torch.stack(found[1].logits))


def scale_weights(model: Any) -> None:
    for layer in model.model.layers[::2]:  # the linear ones
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * 3


def replace_module(model: Any) -> None:
    layer = model.model.layers[0]
    old, layer.mlp.up_proj = layer.mlp.up_proj, nn.Linear(layer.mlp.up_proj.in_features, layer.mlp.up_proj.out_features)
    assert old.weight.shape == layer.mlp.up_proj.weight.shape


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.mul_(-2)


def replace_layer(model: Any) -> None:
    model.model.layers[2] = copy.deepcopy(model.model.layers[2])
    scale_weights(model)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights at another address": scale_weights,
    "another module": replace_module,
    "another layer": replace_layer,
    "the same weights with other values": in_place,
    "the window alone": lambda model: set_branches(model, "window"),
    "an attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *given: given[2] * 2),
    "a method": lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_noticed(change: str, model: Any, done: list[str]) -> None:
    record_all(model, done)
    before = read(model)
    CHANGES[change](model)
    assert not torch.allclose(read(model, graphs=False), before, rtol=1e-3), "the change matters"
    for _ in range(3):
        assert_as_without(model)


def test_without_the_snapshot_a_change_would_be_missed(
    model: Any, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_all(model, done)
    before = read(model)
    monkeypatch.setattr(ModuleSnapshot, "still_holds", lambda self, roots: True)
    set_branches(model, "window")
    assert torch.equal(read(model), before)
    assert not torch.allclose(read(model, graphs=False), before, rtol=1e-3)


def test_adapters_are_followed_when_they_are_switched(model: Any, done: list[str]) -> None:
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)).eval()
    for _ in range(3):
        with_adapters = read(adapted)
    assert "replayed" in done
    with adapted.disable_adapter():
        for _ in range(3):
            without = read(adapted)
            assert_same_logits(without, read(adapted, graphs=False))
    assert not torch.allclose(with_adapters, without, rtol=1e-3)
    assert_same_logits(read(adapted), with_adapters)


@pytest.mark.parametrize("failing", range(4))
def test_a_failed_capture_leaves_the_prompt_as_without(
    failing: int, model: Any, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = prompt_graphs.record, []

    def record(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == failing + 1:
            raise RuntimeError("out of luck\nand more")
        return real(*given)

    monkeypatch.setattr(prompt_graphs, "record", record)
    for number in range(3):
        assert_as_without(model, TOKENS.roll(number, 1))
    assert len(calls) == failing + 1
    read(model)
    assert model.prefilling == "plain chunks: out of luck"


def test_a_copy_of_a_model_makes_its_own_graphs(model: Any, done: list[str]) -> None:
    record_all(model, done)
    wanted = read(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.model.prompts))):
        reader = other.model.prompts if isinstance(other, nn.Module) else other
        assert reader is not model.model.prompts
        assert reader.status == "none yet"
    other = copy.deepcopy(model)
    scale_weights(other)
    assert_as_without(other)
    assert torch.equal(read(model), wanted)


def test_another_thread_reads_without_the_graphs(model: Any, done: list[str]) -> None:
    record_all(model, done)
    wanted, found = read(model, TOKENS.flip(1), graphs=False), []
    second = threading.Thread(target=lambda: found.append(read(model, TOKENS.flip(1))))

    def begin(module: Any, args: Any) -> None:
        if not found and not second.is_alive():
            second.start()
            second.join()

    hook = model.model.layers[1].register_forward_pre_hook(begin)  # a softmax layer, between two that replay
    first = read(model)
    hook.remove()
    assert_same_logits(found[0], wanted)
    assert_same_logits(first, read(model, graphs=False))


def test_what_a_softmax_layer_gets_is_not_overwritten(model: Any, done: list[str]) -> None:
    record_all(model, done)
    given: list[torch.Tensor] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda _, args: given.append(args[0]))
    read(model, TOKENS[:, :5])
    before = given[0].clone()
    read(model, TOKENS.flip(1)[:, :5])
    hook.remove()
    assert torch.equal(given[0], before)
    assert not torch.equal(given[0], given[1])


def test_a_cache_in_another_dtype_is_not_cast(model: Any, done: list[str]) -> None:
    record_all(model, done)
    cache = DynamicCache()
    read(model, TOKENS[:, :CHUNK], cache)
    state = model.model.prompts._states[0]
    assert state.fits(cache.layers[0])
    cache.layers[0].states = {name: x.half() for name, x in cache.layers[0].states.items()}
    assert not state.fits(cache.layers[0])


def test_many_rows_are_read_without_graphs(model: Any, done: list[str]) -> None:
    for _ in range(3):
        read(model, TOKENS[:1].repeat(9, 1))
    assert not done
    assert model.prefilling == "plain chunks: more than 8 rows"


def test_training_gives_the_memory_of_graphs_back(model: Any, done: list[str]) -> None:
    record_all(model, done)
    assert model.model.prompts._states
    model.train()
    model(TOKENS, labels=TOKENS).loss.backward()
    assert not model.model.prompts._states


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixer", ["gla", "gated-deltanet", "liger-paper", "mamba2"])
def test_graphs_on_a_gpu_give_what_plain_chunks_give(mixer: str, dtype: torch.dtype) -> None:
    model = build("llama", type=mixer, window=64, sinks=4)
    model = model.to("cuda", dtype)
    for module in model.modules():
        if type(module).__module__.startswith("liger_convert.mixers"):
            module.float()
    model.prefill_chunk = 512
    generator = torch.Generator().manual_seed(1)
    for tokens in (300, 300, 400, 1200, 1200, 1300):
        ids = torch.randint(3, 101, (2, tokens), generator=generator).cuda()
        plain, found = read(model, ids, graphs=False), read(model, ids)
        assert model.prefilling == "captured chunks"
        assert (found - plain).abs().max() <= (1e-4 if dtype == torch.float32 else 5e-2) * plain.abs().max()
    assert all(chunks.replays for chunks in model.model.prompts._chunks_of.values())
