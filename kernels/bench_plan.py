"""Compares the memory that `linearize plan` estimates with measured peaks: `python kernels/bench_plan.py`.

A case is SHAPE/PART. The shapes are those of `linearize bench`, with random weights. A part is `convert`, `inference`
or a training stage of PARTS. The suffix `-checkpointed` of a stage turns gradient checkpointing on. With `-packed`,
rows hold several documents, and passes are not captured as one CUDA graph.

A stage takes a few optimizer steps with liger-convert's own trainer, on random tokens. In alignment, the mixers are
calibrated first, as in a run. Its peak is torch.cuda.max_memory_allocated, or the memory held after training if that is
more: a captured graph's memory stays reserved, and the optimizer's state is allocated after the capture. `reserved` is
the most that the allocator reserved at once. On a smaller GPU it would have released some of it.
The peak of `convert` is the growth of its process. On a CPU this holds for every case, each in its own process. Every
case immediately prints a line of JSON, which lists the parts of the estimate.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import machine
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_convert.benchmark.shapes import SHAPES, random_model
from liger_convert.config.recipe import Recipe, build
from liger_convert.config.stages import AlignStage, DistillStage, Stage
from liger_convert.data.documents import Document
from liger_convert.data.packed_rows import collate
from liger_convert.pipeline.convert import convert_checkpoint
from liger_convert.pipeline.plan import Plan, make_plan
from liger_convert.training.align import AlignObjective
from liger_convert.training.distill import DistillObjective
from liger_convert.training.finetune import FinetuneObjective
from liger_convert.training.memory_estimate import CALIBRATION_TOKENS
from liger_convert.training.stage import rows_of
from liger_convert.training.student import compile_layers, gains_by_compiling, prepare
from liger_convert.training.trainer import Objective, StageTrainer
from liger_convert.utils.device import autocast, compute_dtype, pick_device
from liger_convert.utils.progress import quiet_libraries

# Learning rates hardly affect memory. With these, a model with random weights stays finite.
LORA = {"targets": ["q_proj", "k_proj", "v_proj"]}
PARTS: dict[str, dict[str, Any]] = {
    "align": {"kind": "align", "learning_rates": {"mixer": 1e-5, "attention": 1e-5}},
    "align-mixer": {"kind": "align", "learning_rates": {"mixer": 1e-5}},
    "distill": {"kind": "distill", "learning_rates": {"mixer": 1e-5, "attention": 1e-5, "body": 1e-5}},
    "distill-lora": {"kind": "distill", "learning_rates": {"mixer": 1e-5, "lora": 1e-5}, "lora": {}},
    "finetune": {"kind": "finetune", "loss_on": "all", "learning_rates": {"lora": 1e-5}, "lora": LORA},
}
CASES = [
    *("smollm2-135m/" + part for part in ("convert", "inference", "align", "distill", "distill-packed", "finetune")),
    *("llama-3.2-1b/" + part for part in ("convert", "inference", "align", "distill", "distill-checkpointed")),
    "llama-3.2-1b/finetune",
    *("llama-3-8b/" + part for part in ("inference", "finetune", "distill-lora-checkpointed")),
]
TOKENS = {"llama-3-8b": 2048, "tiny": 2048}  # per micro-batch; 8,192 for other shapes
# A CPU measures this shape in seconds, and its memory stands out from that of the process itself.
SHAPES["tiny"] = SHAPES["smollm2-135m"] | {"num_hidden_layers": 8, "hidden_size": 384, "intermediate_size": 1024}
SHAPES["tiny"] |= {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 16384}
PROMPT = 4096  # prompt length for which `inference` is estimated


def recipe_of(part: str, a: argparse.Namespace, tokens: int) -> Recipe:
    """A recipe with the stage `part`, or without stages if `part` is not a stage."""
    name = re.sub("-(checkpointed|packed)", "", part)
    stages = []
    if name in PARTS:
        length = min(a.length, tokens)
        rows = {"data": "text", "seq_len": length, "batch_size": tokens // length, "tokens": a.steps * tokens}
        how = {"concat_documents": "-packed" not in part, "gradient_checkpointing": "-checkpointed" in part}
        stages = [PARTS[name] | rows | how]
    fields = {"version": 1, "name": part, "base": "random", "mixer": {"type": a.mixer}, "stages": stages}
    fields |= {"data": {"text": {"source": "pydoc"}}, "precision": a.precision, "device": a.device}
    return build(fields | {"export": {"dtype": "bfloat16"}}, part)


def measure(case: str, a: argparse.Namespace) -> dict[str, Any]:
    """The row of a case: estimated and measured bytes."""
    shape, _, part = case.partition("/")
    values = dict(SHAPES[shape])
    recipe = recipe_of(part, a, a.tokens or TOKENS.get(shape, 8192))
    plan = make_plan(recipe, CONFIG_MAPPING[values.pop("model_type")](**values))
    row: dict[str, Any] = {"case": case}
    started = time.perf_counter()
    if part == "convert":
        row |= {"estimated": plan.memory_bytes["convert"], "measured": converted(shape, plan, pick_device(a.device))}
    elif part == "inference":
        row |= {"estimated": plan.memory_bytes["inference"]} | peak(lambda: read(shape, a), pick_device(a.device))
    else:
        (stage,), (planned,) = recipe.stages, plan.stages
        row |= {"estimated": planned.memory_bytes, "parts": planned.memory, "tokens": stage.batch_size * stage.seq_len}
        row |= peak(lambda: train(shape, stage, a), pick_device(a.device))
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def peak(work: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """The result of `work`, plus its peak memory in bytes beyond what was held before."""
    if device.type == "cpu":
        grown = growth()
        return work() | {"measured": grown()}
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    found = work()
    return found | {
        "measured": max(torch.cuda.max_memory_allocated() - before, found.get("held", 0) - reserved),
        "reserved": torch.cuda.max_memory_reserved() - reserved,
    }


def growth() -> Callable[[], int]:
    """A function that returns the peak growth of this process, in bytes, since this call. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM) to the current size
    before = resident("VmRSS")
    return lambda: resident("VmHWM") - before


def resident(name: str) -> int:
    """A field of /proc/self/status (VmRSS or VmHWM), in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def read(shape: str, a: argparse.Namespace) -> dict[str, Any]:
    """Prefills a prompt and generates a few tokens, with a model in the dtype of an export."""
    device = pick_device(a.device)
    model = random_model(shape, a.mixer, device, torch.bfloat16)
    prompt = torch.randint(3, model.config.vocab_size, (1, a.prompt), device=device)
    model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return {}


def train(shape: str, stage: Stage, a: argparse.Namespace) -> dict[str, Any]:
    """Trains the stage as `training.run_stage` sets it up. Returns the bytes held before and after training and, in
    alignment, at the peak of calibration (all on a GPU only), and whether passes were captured."""
    device = pick_device(a.device)
    dtype = compute_dtype(device, a.precision)
    base = None
    if isinstance(stage, AlignStage | DistillStage):
        base = random_model(shape, None, device, dtype).requires_grad_(False)
    model = random_model(shape, a.mixer, device, torch.float32)
    objective: Objective = FinetuneObjective()
    if isinstance(stage, AlignStage):
        objective = AlignObjective(base, model.config)
    elif isinstance(stage, DistillStage):
        objective = DistillObjective(base, stage)
    dataset = rows_of(stage, {"text": documents(stage, model.config.vocab_size)}, 0)
    told = {}
    if isinstance(objective, AlignObjective):
        rows = [dataset.whole(i % len(dataset)) for i in range(-(-CALIBRATION_TOKENS // stage.seq_len))]
        with autocast(device, dtype):
            objective.calibrate(model, {name: x.to(device) for name, x in collate(rows).items()})
        if device.type == "cuda":
            told["fit"] = torch.cuda.max_memory_allocated()
    model = prepare(model, stage)
    if stage.compile and gains_by_compiling(device):
        compile_layers(model, objective, isinstance(stage, AlignStage))
    with tempfile.TemporaryDirectory() as folder:
        trainer = StageTrainer(model, stage, objective, dataset, out=Path(folder), device=device, dtype=dtype, seed=0)
        if device.type == "cuda":
            told["before"] = torch.cuda.memory_allocated()
        trainer.train()
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            told["held"] = torch.cuda.memory_reserved()
    return told | {"fwd_bwd": "captured" if trainer.eager is None else f"eager: {trainer.eager}"}


def documents(stage: Stage, vocabulary: int) -> list[Document]:
    """Random documents, each a third of a row long."""
    rng, size = np.random.default_rng(0), max(2, stage.seq_len // 3)
    ids_ND = rng.integers(3, vocabulary, (stage.tokens // size + 1, size), dtype=np.int32)
    return [Document(ids_D, np.ones(size, bool), size) for ids_D in ids_ND]


def converted(shape: str, plan: Plan, device: torch.device) -> int:
    """The peak growth, in bytes, of a process that converts a base of that shape."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        write_base(base, shape, device)
        return in_a_process(_convert, base, Path(folder, "converted"), plan.linearization)


def write_base(folder: Path, shape: str, device: torch.device) -> None:
    """Writes a base of that shape with random weights in bfloat16, made on `device`."""
    random_model(shape, None, device, torch.bfloat16).save_pretrained(folder)
    # a conversion also reads and copies the tokenizer; its content does not matter
    symbols = {"<s>": 0, "</s>": 1}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab=symbols, merges=[])), eos_token="</s>")
    made.save_pretrained(folder)


def _convert(base: Path, out: Path, linearization: dict[str, Any]) -> int:
    grown = growth()
    convert_checkpoint(base, out, linearization)
    return grown()


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def attempt(case: str, a: argparse.Namespace) -> dict[str, Any]:
    """The row of a case, or one that says why it is missing, so that other cases still run."""
    torch.manual_seed(0)
    try:
        if a.device == "cpu" and not case.endswith("/convert"):
            return in_a_process(measure, case, a)
        return measure(case, a)
    except torch.OutOfMemoryError:
        return {"case": case, "missing": "out of memory"}
    except Exception as problem:
        return {"case": case, "missing": f"{type(problem).__name__}: {str(problem).splitlines()[0]}"}
    finally:
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("case", "tokens", "estimated", "measured", "estimated / measured", "reserved", "seconds")
    for row in rows:
        if why := row.get("missing"):
            table.add_row(row["case"], "", "", why)
            continue
        reserved = f"{row['reserved'] / 1e9:.2f} GB" if "reserved" in row else ""
        sizes = [f"{row[name] / 1e9:.2f} GB" for name in ("estimated", "measured")]
        ratio = f"{row['estimated'] / max(row['measured'], 1):.2f}"
        table.add_row(row["case"], str(row.get("tokens", "")), *sizes, ratio, reserved, str(row["seconds"]))
    Console(width=140, highlight=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="SHAPE/PART", help=f"({' '.join(CASES)})")
    parser.add_argument("--tokens", type=int, help="of a micro batch (8192, of llama-3-8b 2048)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row (2048)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a stage (3)")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt in inference (4096)")
    parser.add_argument("--mixer", default="gla", help="in every layer (gla)")
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, a tiny shape unless cases are given")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, complete after every case")
    a = parser.parse_args()
    a.device = "cpu" if a.cpu else pick_device().type
    if a.cpu and a.cases is CASES:
        a.cases = [f"tiny/{part}" for part in ("convert", "inference", *PARTS, "distill-checkpointed")]
    for case in a.cases:
        shape, _, part = case.partition("/")
        part = re.sub("-(checkpointed|packed)", "", part)
        if shape not in SHAPES or part not in ("convert", "inference", *PARTS):
            known = f"shapes {', '.join(SHAPES)}; parts convert, inference, {', '.join(PARTS)}"
            parser.error(f"{case}: is no SHAPE/PART; {known}")
    quiet_libraries()
    rows = []
    for case in a.cases:
        rows.append(attempt(case, a))
        print(json.dumps(rows[-1]), flush=True)
        if a.json:
            about = machine(a.device) | {"mixer": a.mixer, "length": a.length, "precision": a.precision}
            a.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    show(rows)
    sys.exit(any("missing" in row for row in rows))


if __name__ == "__main__":
    main()
