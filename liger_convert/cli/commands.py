"""What the commands other than `run` do: single steps of a run, and lists; `measuring` has the measures."""

from __future__ import annotations

import functools
import json
import math
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from liger_convert.benchmark import bench, page, shapes
from liger_convert.config import yaml_file
from liger_convert.config.fields import plain_name
from liger_convert.config.recipe import Recipe, build
from liger_convert.config.sources import FileSource, PydocSource
from liger_convert.data import teacher
from liger_convert.data.documents import Documents, load_source
from liger_convert.data.packed_rows import collate, pack
from liger_convert.eval import generation
from liger_convert.io import checkpoint
from liger_convert.io.checksums import sha256_file
from liger_convert.io.files import atomic_write, refuse_existing, scratch_folder
from liger_convert.io.inputs import check_text
from liger_convert.io.text_part import EMBEDDINGS
from liger_convert.io.weight_scale import weight_scale
from liger_convert.mixers import MIXERS, SOFTMAX, make_spec
from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.linear.gla import GLA
from liger_convert.mixers.trained import caution
from liger_convert.model import linear_layers
from liger_convert.model.bases import context_length
from liger_convert.model.families import base_model_type, is_linearized
from liger_convert.model.loading import check_folder, load_base, load_linearized, load_pretrained
from liger_convert.model.quantization import refuse_quantized
from liger_convert.pipeline import single_steps
from liger_convert.pipeline.begun_stage import begun_stage
from liger_convert.pipeline.convert import convert_checkpoint, replace_mixers
from liger_convert.pipeline.manifest import FILE as MANIFEST
from liger_convert.pipeline.manifest import Manifest, input_files, lock
from liger_convert.pipeline.plan import Plan, make_plan
from liger_convert.pipeline.preflight import wider_windows
from liger_convert.pipeline.stage_plan import nothing_to_train
from liger_convert.training.align import AlignObjective
from liger_convert.training.disk_estimate import of_conversion
from liger_convert.training.student import count_trained
from liger_convert.utils.device import autocast, compute_dtype, pick_device
from liger_convert.utils.errors import BadInput, counted
from liger_convert.utils.progress import console, show_progress

PYDOC = "pydoc"
# what a base has in common with the model that was made from it
SIZES = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@contextmanager
def local_model(source: str, **options: Any) -> Iterator[Path]:
    """A folder with the model `source` for as long as the block runs. Options are those of `base_options`."""
    with scratch_folder() as work:
        yield checkpoint.resolve_base(source, work, **options)


def is_linearized_folder(folder: Path, trust_remote_code: bool = False) -> bool:
    return is_linearized(checkpoint.load_config(folder, trust_remote_code))


def require_linearized(folder: Path) -> None:
    """Raises BadInput unless `folder` holds a linearized model."""
    if not is_linearized_folder(folder):
        raise BadInput(f"{folder}: is not a linearized model; `linearize convert` makes one from it")


def convert_base(
    base: str,
    out: Path,
    *,
    mixer: str,
    window: int | None,
    sinks: int | None,
    layers: str,
    options: Sequence[str],
    dtype: str,
    seed: int,
    **base_options: Any,
) -> Plan:
    """Converts `base` without training into the new folder `out`, and returns the plan it followed.

    layers: YAML of a recipe's `layers`. options: `NAME=VALUE` of the mixer. window, sinks: None for the mixer's own.
    Raises BadInput, LinearizeError.
    """
    spec = {"type": mixer, "window": window, "sinks": sinks}
    written: dict[str, Any] = {
        "version": 1,
        "name": plain_name(out.name),
        "base": base,
        "base_options": base_options,
        "mixer": {name: value for name, value in spec.items() if value is not None},
        "layers": yaml_file.parse(layers, f"--layers {layers}"),
        "export": {"dtype": dtype},
        "seed": seed,
    }
    if (measuring := _measuring(written["layers"])) is not None:
        raise BadInput(
            f"--layers: {measuring} measures layers on the text of a recipe; let `linearize select-layers RECIPE` "
            "choose them, and give what it prints, such as --layers '{softmax: [3, 7]}'"
        )
    for option in options:
        written = yaml_file.override(written, f"mixer.{option}")
    recipe = build(written, "convert")
    refuse_existing(out)
    trust = recipe.base_options.trust_remote_code
    with local_model(base, **base_options) as folder, show_progress("convert") as report:
        plan = make_plan(recipe, checkpoint.load_config(folder, trust), stored=checkpoint.stored_dtype(folder))
        checkpoint.load_tokenizer(folder, trust)  # every later command needs one that works
        for warning in wider_windows(plan):
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        convert_checkpoint(
            folder, out, plan.linearization, dtype=dtype, seed=seed, trust_remote_code=trust, progress=report
        )
    return replace(plan, writes=tuple(of_conversion(plan.writes)))


def calibrate_model(
    model: Path, out: Path, base: str, *, text: str, tokens: int, seq_len: int, seed: int, device: str
) -> dict[str, Any]:
    """Fits the mixers of the linearized model `model` to its `base` on rows of `text`, into the new folder `out`.

    Returns {"tokens": …, "layers": [{"layer", "before", "after"}]}: the relative error of each linearized layer on
    these rows, see `training.align`. `text` is a file, or `pydoc` for Python's documentation. Raises BadInput.
    """
    refuse_existing(out)
    require_linearized(model)
    config = checkpoint.load_config(model)
    refuse_quantized(config, model, "calibrate")
    linearization = config.linearization
    used = [linearization["mixers"][name] for name in set(linearization["layers"]) - {SOFTMAX}]
    reach = [spec.window + spec.sinks for spec in map(make_spec, used) if spec.is_calibrated]
    if not reach:
        raise BadInput(f"{model}: has nothing to calibrate; only mixers with combine: shared or learned are calibrated")
    if tokens < seq_len:
        raise BadInput(f"--tokens {tokens}: is less than one row of --seq-len {seq_len}")
    where = pick_device(device)
    dtype = compute_dtype(where)
    with local_model(base) as folder, show_progress("calibrate") as report:
        require_base(base, folder, model)
        check_folder(model)
        check_folder(folder)
        _warn_unlike(base, folder, model)
        documents = load_source(text_source(text), checkpoint.load_tokenizer(model)).train
        if (held := sum(len(document.ids) for document in documents)) < tokens:
            raise BadInput(f"--text {text}: has {held} tokens, but --tokens asks for {tokens}; give more text")
        rows = pack(documents, seq_len, tokens, seed)
        batch = {name: t.to(where) for name, t in collate([rows[i] for i in range(len(rows))]).items()}
        if int(batch["position_ids"].max()) < min(reach):
            what = f"in rows of {seq_len}, no document is longer than the window and its sinks ({min(reach)} tokens)"
            raise BadInput(f"--text {text}: {what}; give longer documents or a larger --seq-len")
        linearized = load_linearized(model, dtype=torch.float32).to(where).eval()
        objective = AlignObjective(load_base(folder, where, dtype), linearized.config)

        def errors() -> list[float]:
            with autocast(where, dtype):  # left each time, as it keeps the weights that it has cast, changed or not
                return objective.layer_errors(linearized, batch)

        before = errors()
        report(1, 3)
        with autocast(where, dtype):
            objective.calibrate(linearized, batch)
        report(2, 3)
        after = errors()
        report(3, 3)
        replace_mixers(model, out, linearized)
    layers = zip(linear_layers(linearized.config), before, after)
    return {
        "tokens": len(rows) * seq_len,
        "layers": [{"layer": i, "before": error, "after": left} for i, error, left in layers],
    }


def _measuring(layers: Any) -> str | None:
    """The field of a recipe's `layers`, as plain data, that leaves a choice to a measurement; None if there is none."""
    if not isinstance(layers, dict):
        return None
    if "softmax_auto" in layers:
        return "softmax_auto"
    windows = layers.get("long_windows")
    counts = isinstance(windows, dict) and not isinstance(windows.get("layers"), list | None)
    return "long_windows" if counts else None


def require_base(base: str, folder: Path, model: Path) -> None:
    """Raises BadInput unless `base`, in `folder`, is of the family and the sizes of the linearized model `model`."""
    found, made = checkpoint.load_config(folder), checkpoint.load_config(model)
    wanted = {"model_type": base_model_type(made)} | {name: getattr(made, name, None) for name in SIZES}
    for name, value in wanted.items():
        if (has := getattr(found, name, None)) != value:
            raise BadInput(f"--base {base}: its {name} is {has}, but {model} was made from a base with {value}")


def _warn_unlike(base: str, folder: Path, model: Path) -> None:
    """Says on stderr what `unlike_base` finds."""
    if (unlike := unlike_base(base, folder, model)) is not None:
        console.print(f"warning: {unlike}", markup=False, soft_wrap=True)


def unlike_base(base: str, folder: Path, model: Path) -> str | None:
    """A sentence if the weights of `base`, in `folder`, do not look like those that the linearized model `model` was
    made from; else None.

    The manifest knows if the model is in the folder of its run, and if the base is in the same files. Otherwise the
    token embeddings tell, which few trainings change.
    """
    found = {name: file for name, file in input_files({"base": folder}).items() if file.suffix == ".safetensors"}
    if (model.parent / MANIFEST).exists():
        recorded = Manifest.read(model.parent).inputs
        if found.keys() <= recorded.keys():
            changed = [file for name, file in found.items() if sha256_file(file) != recorded[name]]
            what = "is not the file that the run of this model has read"
            return (
                f"--base {base}: {changed[0].name} {what}, so the model was made from another base" if changed else None
            )
    ours, theirs = (checkpoint.Checkpoint.open(one, any_dtype=True).read(EMBEDDINGS) for one in (model, folder))
    if torch.equal(ours, theirs.to(ours.dtype)):
        return None
    what = "are not those of its base, so unless training has changed them the model was made from another base"
    return f"--base {base}: the token embeddings of {model} {what}"


def select_layers(recipe: Recipe) -> single_steps.Chosen:
    """The layers that `recipe` leaves to a measurement, chosen. Raises BadInput."""
    if not recipe.measures_layers:
        why = "say how many layers stay softmax, because the recipe's `layers` does not"
        raise BadInput(f"--softmax-layers: is missing; {why}")
    device, trust = pick_device(recipe.device), recipe.base_options.trust_remote_code
    with local_model(recipe.base, **recipe.base_options.model_dump()) as base:
        plan = make_plan(recipe, checkpoint.load_config(base, trust))
        check_folder(base, trust)
        tokenizer = checkpoint.load_tokenizer(base, trust)
        documents = load_source(recipe.data[recipe.given_texts[0]], tokenizer, seed=recipe.seed).train
        return single_steps.choose_layers(recipe, plan, documents, base, tokenizer, device)


def train_stage(recipe: Recipe, number: int, model: Path, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Stage `number` (from 1) of `recipe` on the linearized model in `model`, into `out`; returns its statistics.

    `out` is new, or with `resume` what an interrupted call left. Raises BadInput, LinearizeError.
    """
    if not 1 <= number <= len(recipe.stages):
        raise BadInput(f"--stage {number}: {recipe.name} has {counted(len(recipe.stages), 'stage')}, counted from 1")
    require_linearized(model)
    config = checkpoint.load_config(model)
    refuse_quantized(config, model, "train")
    shapes = {name: info.shape for name, info in check_folder(model).tensors.items()}
    if count_trained(recipe.stages[number - 1], config, shapes) == 0:  # the recipe may be of another model
        raise BadInput(f"--model {model}: {nothing_to_train(recipe.stages[number - 1])}")
    if not resume:
        refuse_existing(out)
    sources, device = recipe.stages[number - 1].sources, pick_device(recipe.device)
    with local_model(recipe.base, **recipe.base_options.model_dump()) as base:
        tokenizer = checkpoint.load_tokenizer(model)
        check_folder(base)
        require_base(recipe.base, base, model)
        _warn_unlike(recipe.base, base, model)
        begun = begun_stage(recipe, number, model, base, out if resume and out.exists() else None)
        of_base = checkpoint.load_config(base, recipe.base_options.trust_remote_code)
        plan = make_plan(recipe, of_base, scale=weight_scale(base))
        recipe = recipe.with_stages(plan.recipe_stages)
        written = {name: out / f"data-{name}" for name in sources if name in recipe.teachers}

        @functools.cache
        def load(name: str) -> Documents:
            file = written[name] / teacher.FILE if name in written else None
            return load_source(recipe.data[name], tokenizer, seed=recipe.seed, written=file)

        for name in written:  # refuses a prompt before there is a folder
            single_steps.teacher_prompts(recipe, name, tokenizer, load)
        for name, folder in written.items():
            folder.mkdir(parents=True, exist_ok=True)
            with lock(out):
                begun.write(out)
                single_steps.write_teacher_text(recipe, name, folder, base, tokenizer, device, load)
        documents = {name: load(name).train for name in sources}
        single_steps.stage_rows(recipe, number - 1, documents)  # refuses too little text before there is a folder
        out.mkdir(parents=True, exist_ok=True)
        with lock(out):
            begun.write(out)
            return single_steps.train_stage(
                recipe,
                number - 1,
                out,
                model_dir=model,
                results=[],
                documents=documents,
                base_dir=base,
                device=device,
                resume=resume,
            )


def text_source(text: str, option: str = "--text") -> FileSource | PydocSource:
    """What `option`, --text or --other-text, names: a file, or `pydoc`, Python's documentation. Raises BadInput for a
    name that is empty, or of nothing that exists."""
    if not text:
        raise BadInput(f"{option}: the name of a file is empty; name a data file, or {PYDOC}")
    if text != PYDOC and not os.path.exists(text):
        raise BadInput(f"{option}: {text}: there is no such file; name a data file, or {PYDOC}")
    check_text(text, f"{option}: {text}")
    return PydocSource(held_out=0.1) if text == PYDOC else FileSource(path=text)


def generate_text(model: str, prompt: str, write: Callable[[str], object], device: str, **options: Any) -> None:
    """Streams what `model` answers to `prompt` into `write`; see `generation.generate` for options. A note says where
    the prompt is longer than the base's context. Raises BadInput."""
    where = pick_device(device)
    with local_model(model) as folder:
        tokenizer = checkpoint.load_tokenizer(folder)
        size = len(generation.encode(tokenizer, prompt, options.get("chat", True)))
        context = context_length(checkpoint.load_config(folder))
        if context is not None and size > context:
            told = f"the prompt has {size:,} tokens, more than the {context:,} that the base supports"
            console.print(f"note: {told}; what follows may make little sense", markup=False, soft_wrap=True)
        generation.generate(generation.load_model(folder, where), tokenizer, prompt, write=write, **options)


def bench_model(source: str, options: bench.Options, baseline: str | None, out: Path | None) -> dict[str, Any]:
    """`bench.bench_models` of `source`, a model or a shape of `shapes.SHAPES`, written into the new folder `out`.

    baseline: another model or shape, None for a shape's own base. Without `out` nothing is written; with it, what is
    measured before it is complete stands in `OUT.partial.json`. Raises BadInput, LinearizeError.
    """
    so_far = None if out is None else out.with_name(f"{out.name}.partial.json")
    if out is not None:
        refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)

    def keep(results: dict[str, Any]) -> None:
        if so_far is not None:
            atomic_write(so_far, json.dumps(results, indent=2) + "\n")

    shape = shapes.is_shape(source)
    if not shape and options.mixer is not None:
        raise BadInput(
            f"--mixer {options.mixer}: applies only to shapes, but {source} is a model with layers of its own"
        )
    if baseline is None and shape:
        baseline = source
    with (
        _loader(source, options.mixer or GLA.name, options) as load,
        nullcontext() if baseline is None else _loader(baseline, None, options) as load_base,
        show_progress(f"bench {source}") as report,
    ):
        results = bench.bench_models(source, load, load_base, options, report, keep)
    if out is not None and so_far is not None:
        page.write(results, out)
        so_far.unlink(missing_ok=True)
    return results


@contextmanager
def _loader(source: str, mixer: str | None, options: bench.Options) -> Iterator[Callable[[], Any]]:
    """What makes the model on its device, in its dtype: at random for a shape, linearized by `mixer` unless None."""
    if shapes.is_shape(source):
        yield partial(shapes.random_model, source, mixer, options.device, options.dtype)
        return
    trust = options.trust_remote_code
    with local_model(source, trust_remote_code=trust) as folder:
        check_folder(folder, trust)  # at once: a baseline is loaded only after the model was timed

        def load() -> Any:
            model = load_pretrained(folder, dtype=options.dtype, trust_remote_code=trust)
            return model.to(options.device).eval()

        yield load


def describe_mixers(heads: int, kv_heads: int, head_size: int) -> dict[str, dict[str, Any]]:
    """Every mixer in words, with its options at their defaults, and the float32 state of a layer of that shape.

    left_out: what its paper's layer has and it has not, or only by an option. caution: that it was worse in training
    than a window alone, and at which budget; empty for most. fast_paths: the implementations of its recurrence other
    than the plain loop. Raises BadInput for heads that do not divide.
    """
    if heads % kv_heads:
        raise BadInput(f"--heads: {heads} query heads are not a multiple of {kv_heads} key-value heads")
    dims, described = HeadDims(heads * head_size, heads, kv_heads, head_size), {}
    for name, mixer in MIXERS.items():
        spec = mixer.Spec()
        shapes = mixer.cached_states(spec, dims)
        described[name] = {
            "summary": mixer.summary,
            "gate": mixer.gate_rule,
            "left_out": mixer.left_out,
            "caution": caution(name),
            "recurrence": mixer.recurrence,
            "fast_paths": _fast_paths(mixer.recurrence),
            "state": {state: list(shape) for state, shape in shapes.items()},
            "state_bytes": 4 * sum(math.prod(shape) for shape in shapes.values()),
            "options": asdict(spec),
        }
    return described


def _fast_paths(op: str) -> list[str]:
    spec = find_spec(f"gated_kernels.{op}")
    folder = [] if spec is None else spec.submodule_search_locations
    return [module.name for module in pkgutil.iter_modules(folder) if module.name in ("chunk", "triton", "fla")]
