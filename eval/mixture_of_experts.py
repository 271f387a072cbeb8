"""A base with a mixture of experts, end to end: created, trained and converted on a CPU, then timed with every mixer.

    python eval/mixture_of_experts.py --out eval/reports/mixture-of-experts.md

The base is a small Mixtral with random weights and its own tokenizer. It is trained on Python's documentation for
--minutes. Then `linearize run` converts it on the same text with a repeating pattern of layers, as in Linear-MoE
(2503.05447). The tables show what the run's report measured, and the tokens per second in training and decoding with
the same mixer in every layer. The latter needs no training, because speed does not depend on the weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, DynamicCache, MixtralConfig, PreTrainedTokenizerFast

from liger_convert.cli.main import main as linearize
from liger_convert.config.sources import PydocSource
from liger_convert.data.documents import load_source
from liger_convert.data.packed_rows import collate, pack
from liger_convert.data.sources import rows
from liger_convert.io.files import atomic_write
from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model.loading import linearize_base

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
VOCABULARY, ROW, ROWS, RATE = 2048, 256, 4, 3e-3
WINDOW = {"window": 32, "sinks": 4}
MIXER, PATTERN = "gla", ["main", "main", "main", "softmax"]  # of the recipe
REPETITIONS, DECODED = 3, 32  # repetitions of a timing, of which the fastest counts; tokens decoded in each
SUITE = {
    "description": "text, and copying from beyond the window",
    "text": [{"window": ROW, "windows": 32}],
    "copying": [{"length": 96, "draws": 32}],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8, help="of training the base")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the longest stage of the conversion")
    parser.add_argument("--mixers", nargs="*", default=list(MIXERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        trained = make_base(home / "base", args.minutes)
        report = convert(home, args.tokens)
        speeds = {name: speed(home / "base", name) for name in [None, *args.mixers]}
    atomic_write(args.out, page(trained, report, speeds, args))


def make_base(folder: Path, minutes: float) -> str:
    """Trains a base and saves it to `folder`. Returns a phrase with the tokens trained on and the final loss."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("pad", "bos", "eos")}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=VOCABULARY, **SHAPE, **ids))
    documents = load_source(PydocSource(held_out=0.1), tokenizer, seed=0).train
    data = pack(documents, ROW, 4_000_000, 0, copy_fraction=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    end, step, losses = time.monotonic() + 60 * minutes, 0, []
    while time.monotonic() < end:
        elapsed = 1 - (end - time.monotonic()) / (60 * minutes)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 50) * max(0.05, 1 - elapsed)
        batch = collate([data[(step * ROWS + i) % len(data)] for i in range(ROWS)])
        inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        loss = model(**inputs, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        step += 1
    model.save_pretrained(folder)
    last = losses[-20:]
    return f"{step * ROWS * ROW:,} tokens, to a loss of {sum(last) / len(last):.2f}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((row.value["text"] for row in rows(PydocSource())), trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2048, **names)


def convert(home: Path, tokens: int) -> dict[str, Any]:
    """Runs `linearize run` on the base in `home` and returns its report."""
    (home / "suite.yaml").write_text(yaml.safe_dump(SUITE))
    stage = {"data": "text", "seq_len": ROW, "batch_size": ROWS, "copy_fraction": 0.5}
    recipe = {
        "version": 1,
        "name": "mixture-of-experts",
        "base": str(home / "base"),
        "mixer": {"type": MIXER, **WINDOW},
        "layers": {"repeat": PATTERN},
        "device": "cpu",
        "data": {"text": {"source": "pydoc", "held_out": 0.1}},
        "stages": [
            {**stage, "kind": "align", "tokens": tokens // 4, "learning_rates": {"mixer": 2e-3, "attention": 2e-4}},
            {
                **stage,
                "kind": "distill",
                "tokens": tokens,
                "learning_rates": {"mixer": 1e-3, "attention": 2e-4, "body": 5e-5},
            },
        ],
        "eval": {"suite": str(home / "suite.yaml"), "text": "text"},
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code = linearize(["run", str(home / "recipe.yaml"), "--out", str(home / "run")])
    if code:
        raise SystemExit(f"linearize run failed with exit code {code}")
    return json.loads((home / "run" / "report.json").read_text())


def speed(base: Path, name: str | None) -> tuple[float, float]:
    """Tokens per second in training, and in decoding after a prompt of ROW tokens, with this mixer in every layer. name
    None: the base."""
    if name is None:
        model: Any = AutoModelForCausalLM.from_pretrained(base)
    else:
        bounds = {} if name == "forgetting" else WINDOW
        plan = {
            "format": 2,
            "mixers": {"main": resolve_spec({"type": name, **bounds})},
            "layers": ["main"] * SHAPE["num_hidden_layers"],
        }
        model = linearize_base(base, plan, dtype=torch.float32)
    ids = torch.randint(3, VOCABULARY, (ROWS, ROW), generator=torch.Generator().manual_seed(0))

    def train() -> None:
        model.train()(ids, labels=ids).loss.backward()
        model.zero_grad()

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.eval()(ids[:1], past_key_values=cache, use_cache=True)

    @torch.no_grad()
    def decode() -> None:
        for _ in range(DECODED):
            model.eval()(ids[:1, :1], past_key_values=cache, use_cache=True)

    return ids.numel() / fastest(train), DECODED / fastest(decode)


def fastest(run: Any) -> float:
    """Seconds of the fastest of REPETITIONS runs."""
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def page(trained: str, report: dict[str, Any], speeds: dict[str | None, tuple[float, float]], args: Any) -> str:
    """The tables as Markdown."""
    layers = ", ".join(PATTERN).replace("main", MIXER)
    experts = f"{SHAPE['num_local_experts']} experts, {SHAPE['num_experts_per_tok']} of them for a token"
    lines = [
        "# A base with a mixture of experts",
        "",
        f"A random Mixtral of {SHAPE['num_hidden_layers']} layers ({experts}, hidden size {SHAPE['hidden_size']}) was",
        f"trained on Python's documentation for {trained}. It was",
        f"converted with the layers {layers}, a window of {WINDOW['window']}, {WINDOW['sinks']} sinks,",
        f"on {args.tokens // 4:,} tokens of alignment and {args.tokens:,} of distillation.",
        "",
        f"    python eval/mixture_of_experts.py --minutes {args.minutes:g} --tokens {args.tokens} --out {args.out}",
        "",
        *quality(report),
        "",
        "Tokens a second on this CPU with every layer of one mixer, at its defaults: training (forward and backward)",
        f"on {ROWS} rows of {ROW}, and decoding one row behind {ROW} tokens, of {REPETITIONS} the fastest.",
        "Other work on the machine slows single rows, so compare only large differences.",
        "",
        "| mixer | training | decoding |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| `{name or 'base'}` | {training:,.0f} | {decoding:,.0f} |" for name, (training, decoding) in speeds.items()
    ]
    return "\n".join(lines) + "\n"


def quality(report: dict[str, Any]) -> list[str]:
    """The run's measures as lines of a table, a row for each model."""
    measures = list(report["models"]["base"])
    lines = ["| model | " + " | ".join(f"`{name}`" for name in measures) + " |", "|---|" + "---:|" * len(measures)]
    for model, values in report["models"].items():
        cells = (f"{values[name]['value']:.2f} ± {values[name]['stderr']:.2f}" for name in measures)
        lines.append(f"| {model.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
