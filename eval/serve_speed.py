"""Times vLLM on a model with random weights and on its base: same prompts, same engine, one process each.

python eval/serve_speed.py --shape smollm2-135m --prompts 8 --length 512 --new 64 --dtype float32

Prints the batch's tokens per second in prefill and decode, by wall clock and by CPU time, for the base, with every
layer linear, and with a quarter of the layers softmax. With --shortest, prompt lengths are spread evenly from there to
--length. It needs an environment with vLLM (docs/serving.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from serve_bench import KINDS, plan_of

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def save(shape: str, layers: list[str] | None, mixer: str, folder: Path) -> None:
    """Saves a base of that shape to `folder`/base and, unless `layers` is None, its linearized model to
    `folder`/linear. `layers` is repeated up to the model's depth."""
    import torch

    from liger_convert.benchmark.shapes import random_model
    from liger_convert.model.loading import linearize_base

    base = random_model(shape, None, torch.device("cpu"), torch.bfloat16)
    base.config.max_position_embeddings = 1 << 14
    base.save_pretrained(folder / "base")
    if layers is None:
        return
    plan = plan_of(layers, base.config.num_hidden_layers, mixer)
    linearize_base(folder / "base", plan, dtype=torch.bfloat16).save_pretrained(folder / "linear")


def prompt_lengths(prompts: int, shortest: int, longest: int) -> list[int]:
    """Evenly spread lengths, not in ascending order."""
    between = [shortest + (longest - shortest) * i // max(1, prompts - 1) for i in range(prompts)]
    return between[::2] + between[1::2][::-1] if shortest < longest else [longest] * prompts


def measure(folder: Path, lengths: list[int], new: int, dtype: str) -> dict[str, float]:
    """Seconds of prefill ("read") and of decoding `new` tokens after each prompt ("write"), by wall clock and CPU time,
    and the number of decoding steps ("steps")."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=max(lengths) + new, max_num_seqs=len(lengths),
        max_num_batched_tokens=2048, enable_prefix_caching=False, kv_cache_memory_bytes=2 << 30,
    )  # fmt: skip
    core, found = llm.llm_engine, {"read": 0.0, "write": 0.0, "read cpu": 0.0, "write cpu": 0.0}
    for name, read, most in (("warm", lengths[:1], 2), ("timed", lengths, new)):
        found, writing = dict.fromkeys(found, 0.0), 0
        tokens = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        for i, length in enumerate(read):
            prompt = [3 + (7 * i + 5 * t) % 9973 for t in range(length)]
            core.add_request(f"{name}{i}", {"prompt_token_ids": prompt}, tokens)
        begun: set[str] = set()
        while core.has_unfinished_requests():
            clock, cpu = time.perf_counter(), time.process_time()
            kind = "write" if len(begun) == len(read) else "read"
            begun |= {output.request_id for output in core.step()}
            found[kind] += time.perf_counter() - clock
            found[kind + " cpu"] += time.process_time() - cpu
            writing += kind == "write"
    return found | {"steps": writing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--mixer", default="gla", help="a type, or a mapping in YAML")
    for name, default in {"prompts": 8, "length": 512, "new": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shortest", type=int, help="of the prompts; --length unless given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", choices=KINDS, help="one of the three")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lengths = prompt_lengths(options.prompts, options.shortest or options.length, options.length)
    if options.folder is not None:
        print("FOUND" + json.dumps(measure(options.folder, lengths, options.new, options.dtype)))
        return
    for name, layers in KINDS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            save(options.shape, layers, options.mixer, Path(folder))
            part = Path(folder) / ("base" if layers is None else "linear")
            words = [sys.executable, *sys.argv, "--folder", str(part)]
            said = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        found: dict[str, Any] = json.loads(said.rpartition("FOUND")[2].splitlines()[0])
        read, written = sum(lengths), options.prompts * found["steps"]
        print(
            f"{name}: read {read / found['read']:,.0f} tokens a second ({read / found['read cpu']:,.0f} of CPU time), "
            f"wrote {written / found['write']:,.1f} ({written / found['write cpu']:,.1f} of CPU time)",
            flush=True,
        )


if __name__ == "__main__":
    main()
