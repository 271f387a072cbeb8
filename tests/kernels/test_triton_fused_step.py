"""The fused step of one token: on a GPU or, without one, in Triton's interpreter; and through the compiler.

Run as a script, it compiles the step of several sizes for sm_90, which needs the compiler but no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import shared_folder
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton", reason="Triton is not installed")

import gated_kernels  # noqa: E402
from compiled import compile_instead_of_launching, resources, told_by  # noqa: E402
from gated_kernels.check import error  # noqa: E402
from gated_kernels.common.registry import kernel_for, set_kernel  # noqa: E402
from gated_kernels.fused_step import triton as kernels  # noqa: E402
from gated_kernels.fused_step.cases import (  # noqa: E402
    CASES,
    Case,
    changed,
    faults,
    in_pages,
    inputs,
    outcome,
    over_pages,
    placed,
)
from gated_kernels.fused_step.chunk import is_supported  # noqa: E402
from gated_kernels.fused_step.naive import naive_fused_step  # noqa: E402
from tiny import save_tiny_base  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from liger_convert.mixers import resolve_spec  # noqa: E402
from liger_convert.model import modeling  # noqa: E402
from liger_convert.model.cache import LinearizedCacheLayer  # noqa: E402
from liger_convert.model.decoding import Decoder  # noqa: E402
from liger_convert.model.loading import linearize_base  # noqa: E402

BF16 = torch.bfloat16
COMPILED = {  # registers and shared memory are the larger, the more channels and features
    "128 channels, 128 features": Case(D=128, F=128, G=8, R=4, B=16, dtype=BF16),
    "128 channels, 256 features": Case(D=128, F=256, G=8, R=4, B=16, dtype=BF16),
    "64 channels, 128 features": Case(D=64, F=128, G=3, R=3, B=16, dtype=BF16),
    "64 channels, 256 features": Case(D=64, F=256, G=3, R=3, B=16, dtype=BF16),
    "64 channels, 2048 features": Case(D=64, F=2048, G=3, R=3, B=16, dtype=BF16),
    "128 channels, fp32": Case(D=128, F=128, G=8, R=4, B=16),
    "256 channels": Case(D=256, F=256, G=1, R=8, B=1, dtype=BF16),
    "liger-paper": Case("liger-paper", D=128, G=8, R=4, M=0, B=16, dtype=BF16),
}


@pytest.fixture
def use() -> Iterator[Callable[[bool], None]]:
    """Says whether steps are fused; the other ops stay torch's, which are faster than Triton's interpreter."""
    yield lambda fused: set_kernel("fused_step", kernels.triton_fused_step if fused else None)
    set_kernel("fused_step", None)


@pytest.mark.parametrize("case", CASES)
def test_the_step_errs_at_most_twice_as_much_as_the_reference_in_its_dtype(case: str) -> None:
    assert not faults(kernels.triton_fused_step, placed(inputs(CASES[case]), DEVICE))


@pytest.mark.parametrize("case", CASES)
def test_rows_may_be_pages_in_any_order_with_rings_that_begin_anywhere(case: str) -> None:
    given = placed(inputs(CASES[case]), DEVICE)
    assert not faults(over_pages(kernels.triton_fused_step), given)


def test_pages_of_whole_vectors_give_the_same() -> None:
    given = placed(inputs(CASES["padding, bf16"]), DEVICE)
    odd, even = (outcome(over_pages(kernels.triton_fused_step, gap), given) for gap in (3, 16))
    assert [name for name in odd if not torch.equal(odd[name], even[name])] == []


@pytest.mark.parametrize("case", ["small", "17 rows", "heads of 80, fp16", "liger-paper, heads of 80, padding"])
def test_the_definition_gives_the_same_over_pages(case: str) -> None:
    given = inputs(CASES[case])
    here, there = outcome(naive_fused_step, given), outcome(over_pages(naive_fused_step), given)
    assert [name for name in here if not torch.equal(here[name], there[name])] == []


@pytest.mark.parametrize("case", ["small", "liger-paper, heads of 80, padding"])
def test_two_rows_with_each_others_pages_are_seen(case: str) -> None:
    given = placed(inputs(CASES[case]), DEVICE)
    found = faults(over_pages(kernels.triton_fused_step, swap=True), given)
    assert any(fault.startswith("output") for fault in found)
    assert any(fault.startswith("state") for fault in found)


def test_a_write_beside_the_fields_of_a_page_is_seen() -> None:
    def careless(token: Any, cache: Any, config: Any) -> Tensor:
        o_BHD = kernels.triton_fused_step(token, cache, config)
        end = cache.k_NPGD[0].numel()
        cache.k_NPGD.as_strided((1,), (1,), cache.k_NPGD.storage_offset() + end).zero_()
        return o_BHD

    given = placed(inputs(CASES["small"]), DEVICE)
    assert outcome(over_pages(careless), given)["output"].isnan().all()


@pytest.mark.parametrize("case", ["1024 codes", "17 rows", "heads of 128"])
def test_a_program_takes_more_codes_where_there_are_programs_enough(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kernels._pieces(1024, tiles) for tiles in (1, 8, 16, 80)] == [(32, 1), (64, 1), (64, 2), (64, 8)]
    monkeypatch.setattr(kernels, "LAUNCH", kernels.LAUNCH._replace(programs=1))
    assert not faults(kernels.triton_fused_step, placed(inputs(CASES[case]), DEVICE))


def test_an_empty_memory_weighs_nothing_whatever_is_asked_for() -> None:
    token, kept, rules = placed(inputs(CASES["partly filled ring, nothing in memory"]), DEVICE)
    assert rules.memory_weight is not None
    weight = rules.memory_weight
    loud = rules._replace(memory_weight=weight._replace(log_H=torch.full_like(weight.log_H, 1e3)))
    quiet, asked = (outcome(kernels.triton_fused_step, (token, kept, r))["output"] for r in (rules, loud))
    assert torch.equal(quiet, asked)


def test_projections_may_be_parts_of_one_tensor() -> None:
    token, *rest = placed(inputs(CASES["small"]), DEVICE)
    whole = torch.cat([x.flatten(1) for x in (token.q_BHD, token.k_BGD, token.v_BGD)], 1)
    parts = whole.split([x[0].numel() for x in (token.q_BHD, token.k_BGD, token.v_BGD)], 1)
    q, k, v = (x.unflatten(1, (-1, token.q_BHD.shape[2])) for x in parts)
    one, other = (
        outcome(kernels.triton_fused_step, (token, *rest)),
        outcome(kernels.triton_fused_step, (token._replace(q_BHD=q, k_BGD=k, v_BGD=v), *rest)),
    )
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_step_is_chosen_with_the_other_kernels() -> None:
    gated_kernels.use("triton")
    assert kernel_for("fused_step") is kernels.triton_fused_step
    gated_kernels.use("torch")
    assert kernel_for("fused_step") is None


def test_layers_that_the_step_does_not_take_are_left_alone(use: Callable[[bool], None]) -> None:
    _, kept, rules = placed(inputs(CASES["small"]), DEVICE)
    assert not is_supported(kept, rules, 4)
    use(True)
    assert is_supported(kept, rules, 4)
    assert not is_supported(kept._replace(deferred_inputs_NPGD=None), rules, 4)
    assert not is_supported(kept, rules._replace(memory_weight=None), 4)
    assert not is_supported(kept._replace(k_NPGD=kept.k_NPGD[:, :0]), rules, 4)
    assert not is_supported(kept._replace(z_NGF=None), rules, 4)
    assert not is_supported(kept._replace(state_NGFD=kept.state_NGFD.double()), rules, 4)
    assert not is_supported(kept._replace(v_NPGD=kept.v_NPGD.bfloat16()), rules, 4)


def test_pages_are_taken_if_rows_are_contiguous_and_equally_far_apart(use: Callable[[bool], None]) -> None:
    use(True)
    _, kept, rules = placed(inputs(CASES["small"]), DEVICE)
    _, paged = in_pages(kept)
    assert paged.strides == (paged.k_NPGD.stride(0), paged.state_NGFD.stride(0))
    assert is_supported(paged, rules, 4)
    assert not is_supported(paged._replace(v_NPGD=kept.v_NPGD), rules, 4)
    assert not is_supported(paged._replace(v_NPGD=paged.v_NPGD.transpose(1, 2)), rules, 4)


@functools.cache
def build(family: str, softmax: int | None, **spec: Any) -> Any:
    """Three layers, of which the one numbered `softmax` stays softmax, and a memory with weight."""
    layers = ["softmax" if i == softmax else "main" for i in range(3)]
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 5, "sinks": 2} | spec)}, "layers": layers}
    checkpoint = save_tiny_base(family, shared_folder(f"tiny-{family}"), tokenizer=False)
    model = linearize_base(checkpoint, plan, dtype=torch.float32).to(DEVICE).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_share_H"):
                parameter += 4
    return model


@pytest.mark.parametrize(
    ("prompt", "family", "softmax", "spec"),
    [
        (1, "llama", 1, {"gate": "constant", "codes": 17}),
        pytest.param(9, "llama", None, {"codes": 16}, marks=pytest.mark.slow),
        pytest.param(6, "phi3", 0, {"gate": "none", "sinks": 0, "codes": 5}, marks=pytest.mark.slow),
        pytest.param(2, "smollm3", 0, {"type": "liger-paper"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fused_steps_with_padding_and_what_comes_after_them_are_the_plain_ones(
    prompt: int, family: str, softmax: int | None, spec: dict[str, Any], use: Callable[[bool], None]
) -> None:
    model, steps = build(family, softmax, **spec), 6
    tokens = torch.randint(3, 101, (2, prompt + steps + 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, prompt + 2] = mask[1, prompt + 1] = mask[1, prompt + 4] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = []
    for fused in (False, True):
        use(fused)
        decoder, cache, logits = Decoder(model, in_place=True) if fused else model, DynamicCache(), []

        def read(start: int, end: int, model: Any = decoder, cache: Any = cache, logits: Any = logits) -> None:
            inputs = {"input_ids": tokens[:, start:end], "position_ids": positions[:, start:end]}
            out = model(**inputs, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            logits.append(out.logits[:, -1].clone())  # the next replay of a graph overwrites them

        with torch.no_grad():
            read(0, prompt)
            for i in range(prompt, prompt + steps):
                read(i, i + 1)
            assert not fused or model.decoding.endswith(" steps, fused")
            read(prompt + steps, prompt + steps + 2)  # no step
            read(prompt + steps + 2, prompt + steps + 3)  # one step, from a new start
        rows = torch.stack(logits, 1)[mask[:, [prompt - 1, *range(prompt, prompt + steps), -2, -1]].bool()]
        found.append({"logits": rows} | caches(cache))
    plain, ours = found
    assert plain.keys() == ours.keys()
    allowed = 1e-4 if DEVICE == "cuda" else 1e-5  # products of 22 bits, not of 24
    assert {name: e for name in plain if (e := error(ours[name], plain[name])) > allowed} == {}


def in_order(layer: LinearizedCacheLayer) -> dict[str, Tensor]:
    """The rings, the oldest token first."""
    assert layer.positions is not None
    position = layer.positions.ring_position
    rings = {} if position is None else {name: x.roll(-int(position), 1) for name, x in layer.ring.items()}
    return (rings or layer.ring) | {"position": layer.positions.position_BP}


def caches(cache: Any) -> dict[str, Tensor]:
    """What the linearized layers keep, the oldest token first, by name; rings without what fills them."""
    found = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearizedCacheLayer):
            at = layer.positions
            assert at is not None
            real = at.position_BP >= 0
            found |= {f"{i} ring {name}": x[real] for name, x in in_order(layer).items()}
            found |= {f"{i} {name}": x for name, x in (layer.sinks | layer.states | {"seen": at.seen_B}).items()}
    return found


def test_text_is_that_of_plain_steps(use: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "Decoder", functools.partial(Decoder, in_place=True))
    model, prompt = build("llama", None, codes=16), torch.arange(5, 18, device=DEVICE)[None]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(prompt, disable_compile=True, **options)
    use(True)
    assert torch.equal(model.generate(prompt, **options), plain)
    assert model.decoding == ("captured" if DEVICE == "cuda" else "fixed") + " steps, fused"


@pytest.mark.parametrize(
    "spec",
    [{"rope": True}, {"window": 1}, {"forget": True}, {"scope": "all"}, {"gate": "pooled", "feature_map": "softmax"}],
    ids=str,
)
def test_other_layers_take_their_steps_as_before(spec: dict[str, Any], use: Callable[[bool], None]) -> None:
    model, cache, tokens = build("llama", None, **spec), DynamicCache(), torch.full((1, 7), 5, device=DEVICE)
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
        use(True)
        decoder = Decoder(model, in_place=True)
        decoder._to_static(cache)
    assert [layer.fused for layer in cache.layers] == [False] * 3


@pytest.mark.slow  # test_targets compiles some sizes in seconds
def test_the_step_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    lines = told_by(__file__, tmp_path)
    assert [line[0] for line in lines] == ["read_kernel", "write_kernel"] * len(COMPILED)
    shared, spilled = ([int(line[i]) for line in lines] for i in (1, 2))
    assert max(shared) <= 99 * 1024  # of the smallest Ampere and Hopper chips
    assert max(spilled) <= 96  # bytes a thread, and only of heads of 256 and of 2,048 features


def compile_all() -> None:
    """Calls the step of every case with tensors that hold nothing; what would be launched is compiled. Prints each
    kernel, its shared memory, and the bytes that a thread has to put elsewhere than in registers."""

    def tell(name: str, compiled: Any) -> None:
        print(name, compiled.metadata.shared, resources(compiled.asm["cubin"])[1])

    compile_instead_of_launching(tell)
    for case in COMPILED.values():
        kernels.triton_fused_step(*changed(inputs(case), lambda t: t.to("meta")))


if __name__ == "__main__":
    compile_all()
