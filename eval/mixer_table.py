"""Every mixer at equal tokens in one table: text of two kinds, copying, needles, cache size and speed.

    python eval/mixer_table.py BASE --text corpus.jsonl.xz --held-out held_out.jsonl.xz --out runs/mixers --jobs 4

Each entry is a separate `linearize run`, whose folder keeps its recipe, manifest and report. An entry of --mixers is a
mixer, a mixer with options, or a recipe file:

    --mixers gla gla:gate=constant,codes=512 recipes/smollm2-135m-lolcats.yaml

Mixers are trained with recipes/smollm2-135m-mixers.yaml, or with the recipe given by --recipe. In all entries, base,
text and suite are replaced by the given ones. --tokens is the total over a run's stages, which split it in the same
proportions as in their recipe. If that leaves a stage fewer than LEAST steps, its rows become shorter, and then fewer
per step.

The same command resumes where it was stopped, and repeats what failed. Several GPUs are distributed among the jobs.
When all runs are done, `linearize bench` times their decoding, one after the other. OUT holds table.md and table.json,
which are rewritten after every run. Training speed is measured while other jobs run: compare it at --jobs 1.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from liger_convert.config import recipe, yaml_file
from liger_convert.config.fields import NAME_LENGTH, plain_name
from liger_convert.config.resources import recipe_path
from liger_convert.io.files import atomic_write, read_json
from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.pipeline.pages.common import cell, metric_names
from liger_convert.pipeline.pages.read import read_report
from liger_convert.utils.errors import BadInput, LinearizeError

LEAST = 4  # optimizer steps of a stage, if its rows can be cut down to that
SHORTEST = 128  # rows of at most as many tokens are not halved
CONTEXT = 4096  # tokens of the cache whose size is shown
BENCH = ("--lengths", "1024", "--no-compiled", "--decode-steps", "64", "--repeats", "5")


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        return make_table(args)
    except LinearizeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="model folder, hub id or .gguf file")
    parser.add_argument("--text", required=True, help="file of text to train on")
    parser.add_argument("--held-out", required=True, help="file of held-out text of the same kind")
    parser.add_argument("--other-text", help="file of text of another kind; without it, Python's documentation")
    parser.add_argument("--data", help="folder of task rows; without it there are no needles")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), metavar="ENTRY")
    parser.add_argument("--recipe", default=str(recipe_path("smollm2-135m-mixers")), help="of entries that are none")
    parser.add_argument("--suite", default="mixers")
    parser.add_argument("--tokens", type=float, help="of each run, over all its stages")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of every recipe, comes last")
    parser.add_argument("--no-bench", dest="bench", action="store_false", help="time no decoding")
    args = parser.parse_args(words)
    if args.jobs < 1:
        parser.error(f"--jobs: {args.jobs} is none; give 1 or more")
    return args


def make_table(args: argparse.Namespace) -> int:
    """Does every run that is not done yet and writes the table. Returns the exit code. Raises BadInput."""
    recipes = written_recipes(args)
    pool = Jobs(args.jobs)
    before = {number: signal.signal(number, pool.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        failed = run_all(pool, recipes, args)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    write_table(args, list(recipes), failed)
    if pool.stopped:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 1 if failed else 0


def run_all(pool: Jobs, recipes: dict[str, Path], args: argparse.Namespace) -> dict[str, str]:
    """Does the runs that are not done yet, then the timings. Returns by name why entries failed."""
    failed: dict[str, str] = {}

    def one(name: str) -> None:
        reason = pool.run(["run", str(recipes[name]), *_run_options(args.out / name)], args.out / f"{name}.log")
        print(f"{name}: {reason or 'done'}", flush=True)
        with pool.lock:
            if reason:
                failed[name] = reason
            write_table(args, list(recipes), failed)

    with ThreadPoolExecutor(args.jobs) as threads:
        list(threads.map(one, [name for name in recipes if not (args.out / name / "report.json").is_file()]))
    models = {name: args.out / name / "export" for name in recipes if (args.out / name / "report.json").is_file()}
    for name, model in {**models, "base": args.base}.items() if args.bench and models else ():
        if not pool.stopped and (reason := bench(pool, str(model), args.out / f"{name}.bench", args)):
            failed[f"{name}, timed"] = reason
    return failed


# --- recipes


def written_recipes(args: argparse.Namespace) -> dict[str, Path]:
    """The recipe file of each entry by its name, written into OUT. Raises BadInput for invalid entries, and if OUT has
    a run of another recipe under a name."""
    texts: dict[str, str] = {}
    for entry in args.mixers:
        data = recipe_of(entry, args)
        name = data["name"]
        if name in texts:
            raise BadInput(f"--mixers: {entry} is there twice; name each entry once")
        texts[name] = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        parsed = recipe.parse(texts[name], where=f"--mixers {entry}")
        for spec in (parsed.mixer, *parsed.mixers.values()):
            resolve_spec(spec.to_dict(), f"--mixers {entry}: mixer")
        manifest = args.out / name / "manifest.json"
        if manifest.is_file() and read_json(manifest)["recipe"]["text"] != texts[name]:
            raise BadInput(f"{args.out / name}: is a run of a different recipe; name a new folder by --out")
    args.out.mkdir(parents=True, exist_ok=True)
    files = {name: args.out / f"{name}.yaml" for name in texts}
    for name, file in files.items():
        atomic_write(file, texts[name])
    return files


def recipe_of(entry: str, args: argparse.Namespace) -> dict[str, Any]:
    """The recipe of one entry as plain data, named after it."""
    is_file = entry.endswith((".yaml", ".yml"))
    path = Path(entry if is_file else args.recipe)
    data = yaml_file.parse(yaml_file.read(path), str(path))
    if not isinstance(data, dict):
        raise BadInput(f"{path}: a recipe is a mapping of fields (version, name, base, mixer, …)")
    text = {"source": "file", "path": args.text, "validation": args.held_out}
    data |= {"base": args.base, "seed": args.seed, "data": {"text": text}}
    data["eval"] = {"suite": args.suite, "text": "text"}
    if args.other_text is not None:
        data["data"]["other"] = {"source": "file", "path": args.other_text}
        data["eval"]["other_text"] = "other"
    if args.data is not None:
        data["eval"]["data"] = args.data
    if not is_file:
        data["mixer"] = mixer_of(entry)
        data["name"] = name_of(entry)
    if args.jobs > 1 and isinstance(data.get("adapt"), dict):
        data["adapt"]["gpu_memory"] = round(0.9 / args.jobs, 3)
    if args.tokens is not None:
        total = sum(float(stage["tokens"]) for stage in data["stages"])
        data["stages"] = [with_tokens(stage, args.tokens * float(stage["tokens"]) / total) for stage in data["stages"]]
    for override in args.set:
        data = yaml_file.override(data, override)
    return dict(data)


def mixer_of(entry: str) -> dict[str, Any]:
    """`gla:gate=constant,codes=512` as the `mixer` field of a recipe. Raises BadInput."""
    kind, _, options = entry.partition(":")
    mixer: dict[str, Any] = {"type": kind}
    for option in filter(None, options.split(",")):
        field, equals, value = option.partition("=")
        if not equals:
            raise BadInput(f"--mixers {entry}: {option!r} is no option; write option=value")
        mixer[field] = yaml_file.parse(value, f"--mixers {entry}")
    return mixer


def name_of(entry: str) -> str:
    """A name for `entry`, a mixer with options. A long name ends in a checksum, so that no two entries share one."""
    name = plain_name(entry)
    if len(name) < NAME_LENGTH:
        return name
    checksum = f"{zlib.crc32(entry.encode()):08x}"
    return f"{name[: NAME_LENGTH - len(checksum) - 1]}-{checksum}"


def with_tokens(stage: dict[str, Any], tokens: float) -> dict[str, Any]:
    """`stage` with this many tokens, and with rows cut down until it has LEAST steps, if possible."""
    stage = {**stage, "tokens": int(tokens)}
    rows, length = int(stage.get("batch_size", 4)), int(stage.get("seq_len", 512))
    while tokens < LEAST * rows * length and length > SHORTEST:
        length //= 2
    while tokens < LEAST * rows * length and rows > 1:
        rows //= 2
    return {**stage, "batch_size": rows, "seq_len": length}


# --- runs


def _run_options(out: Path) -> list[str]:
    return ["--out", str(out), *(["--resume"] if (out / "manifest.json").is_file() else [])]


class Jobs:
    """Runs `linearize` commands, at most `jobs` at once, and terminates them when told to stop."""

    def __init__(self, jobs: int):
        self.lock = threading.Lock()
        self.stopped = False
        self.running: set[subprocess.Popen[bytes]] = set()
        self.slots: queue.Queue[int] = queue.Queue()
        for slot in range(jobs):
            self.slots.put(slot)
        self.threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        self.gpus = _visible_gpus()

    def run(self, words: Sequence[str], log: Path) -> str | None:
        """Runs `linearize WORDS` with its output appended to the file `log`. Returns None if it succeeds, else why it
        failed."""
        slot = self.slots.get()
        try:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
            if self.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
            with log.open("ab") as file:
                with self.lock:
                    if self.stopped:
                        return "stopped"
                    command = [sys.executable, "-P", "-m", "liger_convert.cli", *words]
                    process = subprocess.Popen(
                        command, stdout=file, stderr=file, env=environment, start_new_session=True
                    )
                    self.running.add(process)
                if self.stopped:  # while the process was started
                    process.terminate()
                code = process.wait()
            with self.lock:
                self.running.discard(process)
        finally:
            self.slots.put(slot)
        if code == 0:
            return None
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return "stopped" if self.stopped else f"exit code {code}: {said[-1] if said else 'it said nothing'}"

    def stop(self, *_: Any) -> None:
        """Terminates running commands, which save the step they have reached. No new ones are started."""
        self.stopped = True
        for process in list(self.running):
            process.terminate()


def _visible_gpus() -> list[str]:
    """The GPUs to distribute among jobs; empty if there is at most one."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if given is None else given.split(",")
    return names if len(names) > 1 else []


def bench(pool: Jobs, model: str, out: Path, args: argparse.Namespace) -> str | None:
    """Times the decoding of a model unless that is done. Returns None if it succeeds, else why it failed."""
    if (out / "bench.json").is_file():
        return None
    device = [option.partition("=")[2] for option in args.set if option.startswith("device=")]
    words = ["bench", model, *BENCH, "--out", str(out), *(["--device", device[-1]] if device else [])]
    return pool.run(words, out.with_suffix(".log"))


# --- the table


def write_table(args: argparse.Namespace, names: Sequence[str], failed: dict[str, str]) -> None:
    reports = {name: args.out / name for name in names if (args.out / name / "report.json").is_file()}
    rows = {name: row_of(read_report(folder), args.out / f"{name}.bench") for name, folder in reports.items()}
    table = {"runs": rows, "failed": failed}
    if rows:
        first = read_report(next(iter(reports.values())))
        of_base = _of_cache(first, "base") | _decoding(args.out / "base.bench")
        table["base"] = {"measures": first["models"]["base"]} | of_base
        table["window_only_untrained"] = {"measures": first["models"]["window_only_untrained"]}
        table["machine"] = first["reproduce"]["device"]
    atomic_write(args.out / "table.json", json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    atomic_write(args.out / "table.md", page(table, args))


def row_of(report: dict[str, Any], bench_folder: Path) -> dict[str, Any]:
    """The entry of one run in the table."""
    seconds, tokens = (sum(stage[key] for stage in report["training"]) for key in ("seconds", "tokens"))
    return {
        "measures": report["models"]["linearized"],
        "memory_ablated": report["models"]["memory_ablated"],
        "memory_used": report["verdict"]["memory_used"],
        "adapted": report["plan"].get("adapted", []),
        "tokens": tokens,
        "training_tokens_per_s": tokens / seconds if seconds else None,
        **_of_cache(report, "linearized"),
        **_decoding(bench_folder),
    }


def _of_cache(report: dict[str, Any], model: str) -> dict[str, float]:
    return {"cache_bytes_per_token": report["plan"]["cache_bytes"][str(CONTEXT)][model] / CONTEXT}


def _decoding(folder: Path) -> dict[str, Any]:
    file = folder / "bench.json"
    if not file.is_file():
        return {}
    (row,) = read_json(file)["rows"]
    return {"decode_ms": row["decode_ms"]} if "decode_ms" in row else {}


def page(table: dict[str, Any], args: argparse.Namespace) -> str:
    """The table as Markdown."""
    lines = ["# Every mixer at equal tokens", ""]
    if not table["runs"]:
        return "\n".join([*lines, "No run is done yet.", *_failures(table)]) + "\n"
    measured = {name: row["measures"] for name, row in table["runs"].items()}
    metrics = [name for name in metric_names(measured) if not name.endswith("_byte_ppl")]
    budgets = sorted({row["tokens"] for row in table["runs"].values()})
    budget = f"{budgets[0]:,}" if len(budgets) == 1 else f"{budgets[0]:,} to {budgets[-1]:,}"
    lines += [
        f"`{Path(args.base).name}`, converted and trained on {budget} tokens by `linearize run`, seed {args.seed}, on",
        f"{table['machine']}, {args.jobs} runs at a time.",
        "± is one model's standard error; all models read the same text. Lower is better but for needles, which are",
        f"fractions found. Cache: bytes for each token of a context of {CONTEXT:,}, all layers. Training: tokens a",
        "second over all stages. Decoding: milliseconds a token behind 1,024, one sequence, median.",
        "",
        "| mixer | " + " | ".join(f"`{name}`" for name in metrics) + " | memory used | cache | training | decoding |",
        "|---|" + "---:|" * len(metrics) + "---|---:|---:|---:|",
        _line("base", table["base"], metrics),
        _line("window only, untrained, of the first", table["window_only_untrained"], metrics),
        *(_line(f"`{name}`", row, metrics) for name, row in table["runs"].items()),
    ]
    told = [f"- `{name}`: {sentence}" for name, row in table["runs"].items() for sentence in row.get("adapted", [])]
    lines += ["", "Fitted to the base and the machine:", "", *told] if told else []
    return "\n".join(lines + _failures(table)) + "\n"


def _line(title: str, row: dict[str, Any], metrics: Sequence[str]) -> str:
    used = {True: "yes", False: "no"}.get(row.get("memory_used"), "")
    size, speed, step = (row.get(key) for key in ("cache_bytes_per_token", "training_tokens_per_s", "decode_ms"))
    cells = [title, *(cell(row["measures"].get(metric)) for metric in metrics), used]
    cells += ["" if size is None else f"{size:,.0f}", "" if speed is None else f"{speed:,.0f}"]
    return "| " + " | ".join([*cells, "" if step is None else f"{step['median']:.2f}"]) + " |"


def _failures(table: dict[str, Any]) -> list[str]:
    said = [f"- `{name}`: {reason}" for name, reason in table["failed"].items()]
    return ["", "Not in the table:", "", *said] if said else []


if __name__ == "__main__":
    sys.exit(main())
