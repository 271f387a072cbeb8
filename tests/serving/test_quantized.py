"""vLLM answers as transformers does for the same 8-bit export.

Both quantize the inputs of a linear map per token. If a number lies almost exactly between two quantization steps, the
last bits of float32 decide which step it gets. Then vLLM and transformers can differ by one step, and everything that
follows differs by about as much. So most answers must agree to float32 precision. All answers together must agree far
better with each other than with the model before quantization.

For int8, vLLM divides a token's largest number by 127, and compressed-tensors by 127.5. Here, transformers uses vLLM's
rule. With its own rule, it only has to be as close as quantization itself allows.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.lifecycle import forward
from safetensors.torch import load_file, save_file
from served import Answer, Reference, answers, engine, make_export, prompts, run

from liger_convert.pipeline.export import export_model

TEXTS = prompts()
MOST = len(TEXTS) // 2  # of the answers that agree as far as float32 tells: 7 of 10 and more, and none with a fault
SHARE = 0.1  # of what quantizing changes: how far all answers together may be from transformers'
LAYERS = ["main", "softmax", "main"]


class Case:
    """An export in 8 bits, the one that it was made from, and vLLM's answers to TEXTS."""

    def __init__(self, folder: Path, scheme: str, family: str = "llama"):
        self.scheme = scheme
        plain = make_export(folder, family, LAYERS, type="gla")
        self.export, self.exact = folder / scheme, Reference(plain)
        export_model(plain, self.export, quantize=scheme)
        self.reference = Reference(self.export)
        self.found = served(self.export)


def served(export: Path, **options: Any) -> list[Answer]:
    with engine(export, **options) as llm:
        return [answers(output)[0] for output in run(llm, TEXTS, every=2)]


@pytest.fixture(scope="module", params=["int8", "fp8"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def vllms_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers quantizes inputs to int8 as vLLM does."""
    stock = forward.compute_dynamic_scales_and_zp

    def scales(value: Any, args: Any, module: Any, global_scale: Any = None) -> Any:
        scale, zero = stock(value=value, args=args, module=module, global_scale=global_scale)
        return (scale * (127.5 / 127) if args.type == "int" else scale), zero

    monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", scales)


def distance(model: Reference, text: list[int], found: Answer) -> float:
    """The largest difference of a log-probability in `found` from the model's, given the same tokens."""
    scores = model.score(text, found.tokens).gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    return float((scores - torch.tensor(found.logprobs)).abs().max())


def agreeing(reference: Reference, found: list[Answer]) -> int:
    """How many answers equal those of `generate`, with the same log-probabilities to float32 precision."""
    count = 0
    for text, answer in zip(TEXTS, found):
        close = distance(reference, text, answer) <= reference.tolerance(text)
        count += close and answer.tokens == reference.generate(text).tokens
    return count


def apart(reference: Reference, found: list[Answer]) -> float:
    return sum(distance(reference, text, answer) for text, answer in zip(TEXTS, found))


def assert_served(case: Case) -> None:
    assert agreeing(case.reference, case.found) >= MOST
    assert apart(case.reference, case.found) <= SHARE * apart(case.exact, case.found)


def test_vllm_answers_as_transformers_does(case: Case, vllms_rule: None) -> None:
    assert_served(case)
    assert agreeing(case.exact, case.found) == 0  # it is the quantized model that was served


def test_stock_transformers_is_nearer_than_the_model_that_was_quantized(case: Case) -> None:
    assert apart(case.reference, case.found) < apart(case.exact, case.found)


def test_swapping_two_scales_changes_the_answers(case: Case, tmp_path: Path, vllms_rule: None) -> None:
    shutil.copytree(case.export, tmp_path / "swapped")
    (file,) = (tmp_path / "swapped").glob("*.safetensors")
    tensors = load_file(file)
    scale = tensors["model.layers.0.mlp.up_proj.weight_scale"]
    low, high = int(scale.argmin()), int(scale.argmax())
    scale[[low, high]] = scale[[high, low]]
    save_file(tensors, file, metadata={"format": "pt"})
    found = served(tmp_path / "swapped")
    assert agreeing(case.reference, found) == 0
    assert apart(case.reference, found) > SHARE * apart(case.exact, found)


def test_vllm_in_bfloat16_is_as_close_as_rounding_allows(case: Case) -> None:
    """vLLM may differ from the project's own bfloat16 result by at most twice as much as that differs from float32."""
    rounded = Reference(case.export, torch.bfloat16)
    errors, faults = [], []
    for text, found in zip(TEXTS, served(case.export, dtype="bfloat16")):
        at = torch.tensor(found.tokens)[:, None]
        of_bf16, of_fp32 = (model.score(text, found.tokens).gather(1, at)[:, 0] for model in (rounded, case.reference))
        errors.append((of_bf16 - of_fp32).abs())
        faults.append((torch.tensor(found.logprobs) - of_bf16).abs())
    assert torch.cat(faults).mean() <= 2 * torch.cat(errors).mean()


@pytest.mark.parametrize("family", ["phi3", "qwen2", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_families_are_served_quantized(family: str, tmp_path: Path) -> None:
    """The families have one projection for queries, keys and values; biases; and norms of queries and keys."""
    assert_served(Case(tmp_path, "fp8", family))
