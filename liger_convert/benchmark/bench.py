"""Prefill and decoding speed of a model, and its memory, compared with its base.

A model whose decoding does not equal its prefill is not timed. Times are medians with quartiles over random prompts, a
new one each time, and the first is not counted. Prompts can be skipped: then all but their first tokens are noise in
the cache. A step takes as long with noise, and a long context of many rows is available at once.

Shapes: B batch, T tokens of a prompt, N tokens checked, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gated_kernels import in_use
from torch import Tensor, nn

from liger_convert.benchmark.limits import Limits, least_ms, limits_of, timed, work_of
from liger_convert.benchmark.sides import (
    Side,
    cache_bytes,
    decode,
    decode_as_generated,
    decode_compiled,
    dynamic_caches,
    fill,
    prefill,
    static_caches,
)
from liger_convert.config.resources import PACKAGE
from liger_convert.model import linear_layers
from liger_convert.model.decoding import why_plain
from liger_convert.model.quantization import check_8_bits, store_in_8_bits
from liger_convert.pipeline.manifest import machine
from liger_convert.utils.device import out_of_memory
from liger_convert.utils.errors import BadInput, LinearizeError, first_line
from liger_convert.utils.progress import Report

BASE, STATIC = "base", "base, compiled"
OUT_OF_MEMORY = "out of memory"
ATTENTIONS = ("eager", "sdpa")  # transformers' names for attention in separate products, and by torch's own function
FORMAT_VERSION = 1
CHECKED = 32  # tokens of the check's prompt beyond the largest window
CHECKED_STEPS = (1, 1, 2, 4)  # steps of the calls of the decode loop that are compared
UNCAPTURED_PROMPTS = 2  # on a GPU: the first of a length runs without graphs, and the second captures them
LARGEST = 1e-4  # allowed difference in float32, relative to the largest logit; as in tests/support/tiny_models.py


@dataclass(frozen=True)
class Options:
    """What is measured, and how.

    lengths: tokens of the prompts, ascending. steps: tokens decoded after each. repeats: prompts of each length.
    prefill: whether prompts are read; otherwise their caches are filled with noise. compiled: whether the base is also
    measured compiled, which compiles it again for every length. mixer: of a shape's layers; None: gla. quantize: a key
    of SCHEMES in model/quantization.py, for the weights of the model but not of its base; None: as they are. attention:
    one of ATTENTIONS, for the base; None: what transformers chooses.
    trust_remote_code: whether code that comes with a model may run.
    """

    lengths: Sequence[int]
    batch_size: int
    steps: int
    repeats: int
    device: torch.device
    dtype: torch.dtype
    prefill: bool = True
    compiled: bool = True
    mixer: str | None = None
    quantize: str | None = None
    attention: str | None = None
    trust_remote_code: bool = False


def parse_lengths(text: str) -> list[int]:
    """`1024,4096` as numbers, ascending. Raises BadInput."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,8}", word) and int(word) for word in words):
        raise BadInput(f"--lengths: {text!r} is not a list of prompt lengths; give tokens, such as 1024,4096")
    return sorted({int(word) for word in words})


@torch.no_grad()
def check(side: Side, options: Options) -> dict[str, float]:
    """Compares the logits of several calls of `side.decode` with those of one pass over the same tokens, uncached.

    In float32, no logit may differ by more than LARGEST times the largest. In lower precision, the mean difference may
    be twice the mean difference between that pass and the same pass in float32. Raises LinearizeError if it is larger.
    Returns the tokens of the prompt, the error and the error allowed, relative to the largest logit.
    """
    model, tokens, steps = side.model, _past_windows(side.model), sum(CHECKED_STEPS)
    text = _random_tokens(model, tokens, options)
    # with the size of the first measurement if that is enough, so that code is compiled once for both
    empty, parts = side.caches(max(tokens + steps, _room(options.lengths[0], options))), text.split(tokens // 2 + 1, 1)
    for _ in range(_uncaptured(model, options)):
        prefill(model, empty(), parts[0])
    cache = empty()
    for part in parts:
        token = prefill(model, cache, part)
    decoded = []
    for count in CHECKED_STEPS:
        chosen_BN, logits_BV = side.decode(model, cache, token, count)
        text = torch.cat((text, token, chosen_BN[:, :-1]), 1)
        token = chosen_BN[:, -1:]
        decoded.append(logits_BV.float())
    compared = torch.tensor(CHECKED_STEPS).cumsum(0) - 1

    def whole() -> Tensor:
        return model(input_ids=text, use_cache=False, logits_to_keep=steps).logits[:, compared.to(text.device)].float()

    found = whole()
    scale, difference = found.abs().max(), (torch.stack(decoded, 1) - found).abs()
    if options.dtype == torch.float32:
        error, allowed = float(difference.max() / scale), LARGEST
    else:
        with in_float32(model):
            rounding = (found - whole()).abs().mean()
        error, allowed = float(difference.mean() / scale), float(2 * rounding / scale)
    if not error <= allowed:
        raise LinearizeError(
            f"{side.name}: decoding differs from prefill by {error:.1e} of the largest logit, where rounding explains "
            f"{allowed:.1e}, so nothing is timed"
        )
    return {"tokens": tokens, "error": error, "allowed": allowed}


def _mixers(model: Any) -> list[dict[str, Any]]:
    """The resolved spec of every linearized layer."""
    config = model.config
    if not getattr(config, "linearization", None):
        return []
    names = config.linearization["layers"]
    return [config.linearization["mixers"][names[i]] for i in linear_layers(config)]


def _past_windows(model: Any) -> int:
    """The tokens of a prompt that reaches beyond every window and its sinks."""
    return max((spec["window"] + spec["sinks"] for spec in _mixers(model)), default=0) + CHECKED


def _uncaptured(model: Any, options: Options) -> int:
    """How many prompts of a length a model reads before it replays graphs. The base has none."""
    return UNCAPTURED_PROMPTS if options.device.type == "cuda" and hasattr(model, "prefilling") else 0


def _room(tokens: int, options: Options) -> int:
    return tokens + 1 + options.steps


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within the context, each module computes in float32. Only the weights of the running module are held twice."""
    narrow: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def widen(module: nn.Module, args: Any) -> None:
        narrow[module] = dict(module._parameters)
        for name, parameter in narrow[module].items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_plain(parameter).float(), requires_grad=False)

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(narrow.pop(module))

    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    hooks = [module.register_forward_pre_hook(widen) for module in owners]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in owners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plain(parameter: Any) -> Tensor:
    """The numbers that a parameter stands for, which may be stored in 8 bits."""
    numbers: Tensor = parameter.dequantize() if hasattr(parameter, "qdata") else parameter.data
    return numbers


def measure(side: Side, tokens: int, options: Options) -> dict[str, Any]:
    """One row: times with prompts of `tokens` tokens, and the memory. If memory runs out, the row has an `error`."""
    row: dict[str, Any] = {"model": side.name, "tokens": tokens}
    empty = side.caches(_room(tokens, options))
    device, batch = options.device, options.batch_size
    told = tokens if options.prefill else min(tokens, _past_windows(side.model))
    read, wrote = [], []
    try:
        for _ in range(_uncaptured(side.model, options) - 1 if options.prefill else 0):
            prefill(side.model, empty(), _random_tokens(side.model, told, options))
        for repeat in range(options.repeats + 1):
            if repeat == 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            ids_BT, cache = _random_tokens(side.model, told, options), empty()
            seconds, token_B1 = timed(device, prefill, side.model, cache, ids_BT)
            read.append(1e3 * seconds)
            if told < tokens:
                fill(cache, tokens - told)
            token_B1, _ = side.decode(side.model, cache, token_B1, 1)  # not timed, because it may capture a graph
            seconds, _ = timed(device, side.decode, side.model, cache, token_B1, options.steps)
            wrote.append(1e3 * seconds / options.steps)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return row | {"error": OUT_OF_MEMORY}
    prefill_ms, decode_ms = quartiles(read[1:]) if options.prefill else None, quartiles(wrote[1:])
    return row | {
        "prefill_ms": prefill_ms,
        "prefill_tokens_per_s": 1e3 * batch * tokens / prefill_ms["median"] if prefill_ms else None,
        "decode_ms": decode_ms,
        "decode_tokens_per_s": 1e3 * batch / decode_ms["median"],
        "cache_bytes": cache_bytes(cache),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def quartiles(values: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "q1": q1, "q3": q3, "n": len(values)}


def _random_tokens(model: Any, tokens: int, options: Options) -> Tensor:
    return torch.randint(model.config.vocab_size, (options.batch_size, tokens)).to(options.device)


@torch.no_grad()
def bench_models(
    source: str,
    load: Callable[[], Any],
    load_base: Callable[[], Any] | None,
    options: Options,
    report: Report,
    keep: Callable[[dict[str, Any]], object] = lambda results: None,
) -> dict[str, Any]:
    """The content of bench.json: measurements of the model that `load` returns and of its base, the base's ratios to
    the model, and the least time that each could take on this device.

    The models are in memory one after the other. `keep` is called with the results so far after every row. Raises
    LinearizeError when the model's check fails, BadInput for a model whose cache cannot be filled. A base that fails
    its check, or that cannot run, is in `missing` with the reason.
    """
    if options.attention not in (None, *ATTENTIONS):
        raise BadInput(f"--attention: {options.attention!r} is not known; use {' or '.join(ATTENTIONS)}")
    if options.quantize is not None:
        check_8_bits(options.quantize)  # before a model is loaded
    torch.manual_seed(0)
    limits = limits_of(options.device, options.dtype)  # measured before a model fills the memory
    results = _without_rows(source, options, limits)
    rows = results["rows"]
    total = len(options.lengths) * (1 if load_base is None else 2 + _compiles_base(options))

    def say(note: str) -> None:
        report(len(rows), total, note)

    def add(side: Side) -> None:
        work = work_of(side.model)
        for tokens in options.lengths:
            say(f"{side.name}, {tokens} tokens")
            row = measure(side, tokens, options)
            least = {"prefill": least_ms(work, limits, options.batch_size, tokens)} if options.prefill else {}
            row["limit_ms"] = least | {"decode": least_ms(work, limits, options.batch_size)}
            if side.name in (BASE, STATIC):
                row["ratio"] = _ratio(row, next(ours for ours in rows if ours["tokens"] == tokens))
            rows.append(row)
            keep(results)
            _free(options.device)

    _measure_model(source, load, options, results, add, say)
    _free(options.device)
    _measure_base(load_base, options, results, add, say)
    return results


def _without_rows(source: str, options: Options, limits: Limits) -> dict[str, Any]:
    """The content of bench.json before anything is measured."""
    return {
        "format": FORMAT_VERSION,
        "source": source,
        "parameters": 0,
        "machine": _machine(options.device),
        "commit": _commit(),
        "kernels": in_use(),
        "decoding": "plain steps",
        "prefilling": "plain chunks",
        "dtype": str(options.dtype).removeprefix("torch."),
        "quantize": options.quantize,
        "base_attention": None,
        "batch_size": options.batch_size,
        "decode_steps": options.steps,
        "prompts": "read" if options.prefill else "filled",
        "memory": "peak_bytes" if options.device.type == "cuda" else "cache_bytes",
        "limits": limits._asdict(),
        "check": {},
        "rows": [],
        "missing": {},
    }


def _compiles_base(options: Options) -> bool:
    return options.compiled and options.device.type == "cuda"


def _measure_model(
    source: str,
    load: Callable[[], Any],
    options: Options,
    results: dict[str, Any],
    add: Callable[[Side], None],
    say: Callable[[str], None],
) -> None:
    """Checks and measures the model that `load` returns, which is no longer in memory afterwards."""
    say("making the model")
    model = load()
    if options.quantize is not None:
        store_in_8_bits(model, options.quantize)
    if not options.prefill and not all(spec["window"] for spec in _mixers(model)):
        raise BadInput(f"--no-prefill: {source} has unlimited windows, whose tokens must be read; leave it out")
    linearized = getattr(model.config, "linearization", None) is not None
    results["parameters"] = sum(p.numel() for p in model.parameters())
    side = Side("linearized" if linearized else "model", model, dynamic_caches(model), decode)
    if linearized and why_plain(model) is None:
        side = side._replace(decode=decode_as_generated(model))
    say("checking the model")
    results["check"] = check(side, options)
    results["decoding"] = getattr(model, "decoding", "plain steps")
    results["prefilling"] = getattr(model, "prefilling", "plain chunks")
    add(side)


def _measure_base(
    load_base: Callable[[], Any] | None,
    options: Options,
    results: dict[str, Any],
    add: Callable[[Side], None],
    say: Callable[[str], None],
) -> None:
    """Checks and measures the base, on a GPU also compiled. `results` gets the reason for what could not be measured,
    and the name of the base's attention."""
    base, reason, missing = None, "no base was given; name one with --baseline", results["missing"]
    if load_base is not None:
        try:
            base = load_base()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            reason = OUT_OF_MEMORY
    if base is None:
        missing[BASE] = missing[STATIC] = reason
        return
    if options.attention is not None:
        base.set_attn_implementation(options.attention)
    results["base_attention"] = base.config._attn_implementation
    sides = [Side(BASE, base, dynamic_caches(base), decode)]
    if _compiles_base(options):
        sides.append(Side(STATIC, base, static_caches(base), decode_compiled))
    elif options.compiled:
        missing[STATIC] = f"transformers compiles a static cache for a GPU, and this ran on {options.device.type}"
    for side in sides:
        try:
            say(f"checking the {side.name}")
            check(side, options)
            add(side)
        except Exception as error:  # for example from a compiler: the other rows stay valid
            missing[side.name] = first_line(error)


def _ratio(row: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float] | None:
    if "error" in row or "error" in ours:
        return None
    both = [name for name in ("prefill_ms", "decode_ms") if row[name] and ours[name]]
    times = {name: row[name]["median"] / ours[name]["median"] for name in both}
    sizes = {name: row[name] / ours[name] for name in ("cache_bytes", "peak_bytes") if ours[name]}
    return times | sizes


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _machine(device: torch.device) -> dict[str, Any]:
    found = machine(device, torch.get_num_threads())
    with contextlib.suppress(PackageNotFoundError):
        found["versions"]["triton"] = version("triton")
    return found


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` if it has changes. None if there is none."""

    def git(*words: str) -> str:
        ran = subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != PACKAGE.parent.resolve():
            return None  # an installed package, inside somebody else's checkout
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")
    except (OSError, subprocess.CalledProcessError):
        return None
