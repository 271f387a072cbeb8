"""What `linearize eval` and `linearize diagnose` do: which text and tasks a suite reads, and on which models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from liger_convert.cli.commands import (
    PYDOC,
    is_linearized_folder,
    local_model,
    require_base,
    require_linearized,
    text_source,
    unlike_base,
)
from liger_convert.config.recipe import Recipe
from liger_convert.config.sources import FileSource, PydocSource, meet
from liger_convert.data.documents import Document, load_source
from liger_convert.data.row_files import is_data_file
from liger_convert.eval import ablation, evaluation, generation, suites
from liger_convert.eval.narrow import context_of, cut_prompts, narrow
from liger_convert.eval.quantization_loss import quantization_loss, windows_of_text
from liger_convert.io import checkpoint
from liger_convert.io.checksums import files_in
from liger_convert.io.files import refuse_existing
from liger_convert.model.families import is_linearized
from liger_convert.model.loading import check_folder
from liger_convert.model.quantization import check_quantizable
from liger_convert.model.rotary import length_limit
from liger_convert.pipeline.export import export_model
from liger_convert.pipeline.manifest import FILE as MANIFEST
from liger_convert.pipeline.manifest import Manifest
from liger_convert.pipeline.preflight import check_tasks
from liger_convert.pipeline.recorded_inputs import sha256_input
from liger_convert.utils.device import pick_device
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import part_of, show_progress

OTHER_TOKENS = (
    "splits text into other tokens than the model, so perplexities and losses per token cannot be compared; those per "
    "byte (`_byte_ppl`) can, although the windows end at other places of the text"
)


class EvalInputs:
    """What `eval` and `diagnose` measure, and on which text.

    text: a file of held-out text, or `pydoc` for Python's documentation. other_text: the same, of another kind; without
    it that is `pydoc`, if `text` is not. data_dir: a folder of task rows. include_path: a folder with tasks. limit:
    documents per task. Raises BadInput.
    """

    def __init__(
        self,
        suite: str,
        *,
        text: str = PYDOC,
        other_text: str | None = None,
        data_dir: Path | None = None,
        include_path: Path | None = None,
        limit: int | None = None,
        batch_size: int = 4,
        device: str = "auto",
        precision: str = "auto",
    ):
        self.suite, self.device, self.precision = _suite(suite, include_path), pick_device(device), precision
        suites.check_data(self.suite, data_dir, limit)
        text_source(text)  # also refused if the suite does not read it
        self.text, self.other_text = text, _other_text(text, other_text)
        self.data_dir, self.limit, self.batch_size = data_dir, limit, batch_size

    @property
    def needs_held_out(self) -> bool:
        return self.suite.needs_held_out(has_other=self.other_text is not None)

    def documents(self, tokenizer: Any, model: str | Path) -> dict[str, Any]:
        """The texts that the suite reads, as arguments of `evaluation.evaluate_model`. model: whose run says which part
        of Python's documentation is held out."""
        return {
            "held_out": _held_out(self.text, tokenizer, model) if self.needs_held_out else None,
            "other": _other(self.suite, self.other_text, tokenizer),
        }

    def rehearse(self, folder: Path, tokenizer: Any, trust_remote_code: bool = False, *, has_base: bool) -> list[str]:
        """Tries the tasks without the model in `folder`. Returns a note for everything that is not measured on it.

        Raises BadInput for a task that would fail later, after hours of others.
        """
        config = checkpoint.load_config(folder, trust_remote_code)
        suite, notes = narrow(
            self.suite,
            context=context_of(config),
            tokenizer=tokenizer,
            data_dir=self.data_dir,
            has_other=self.other_text is not None,
            has_base=has_base,
        )
        with show_progress("tasks") as report:
            check_tasks(suite, config, tokenizer, self.data_dir, self.limit, report)
        return notes


def evaluate_models(
    model: str, baseline: str | None, inputs: EvalInputs, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """{"suite": …, "models": {NAME: {METRIC: measurement}}}, NAME `linearized` or `model`, and `base` for a baseline;
    where something of the suite was left out also {"notes": […]}. Raises BadInput."""
    if baseline == model:
        raise BadInput(f"--baseline {baseline}: is the model itself; name another one, or leave it out")
    suite, found, base_rows = inputs.suite, {}, None
    lengths: dict[str, list[int]] = {}  # of the documents in tokens, by model
    with ExitStack() as stack:
        folders = {
            source: stack.enter_context(local_model(source, trust_remote_code=trust_remote_code))
            for source in (baseline, model)
            if source is not None
        }
        for folder in folders.values():  # before hours go into the first
            check_folder(folder, trust_remote_code)
        tokenizers = {
            source: checkpoint.load_tokenizer(folder, trust_remote_code) for source, folder in folders.items()
        }
        notes = {
            source: inputs.rehearse(folder, tokenizers[source], trust_remote_code, has_base=baseline is not None)
            for source, folder in folders.items()
        }
        if suite.agreement is not None and baseline is not None:
            _require_same_vocabulary(baseline, tokenizers[baseline], tokenizers[model])
        for source, folder in folders.items():
            own = "linearized" if is_linearized_folder(folder, trust_remote_code) else "model"
            name = "base" if source == baseline else own
            tokenizer = tokenizers[source]
            options: dict[str, Any] = {"batch_size": inputs.batch_size, "precision": inputs.precision}
            texts = inputs.documents(tokenizer, model)
            lengths[source] = [len(document.ids) for text in texts.values() for document in text or ()]
            options |= texts
            measured = None  # lets go of the model before
            measured = generation.load_model(
                folder, inputs.device, inputs.precision, trust_remote_code=trust_remote_code
            )
            with show_progress(source) as report:
                if source == baseline and suite.agreement is not None:
                    first, report = part_of(report, 0, 2), part_of(report, 1, 2)
                    base_rows = evaluation.let_base_write(measured, tokenizer, suite, **options, report=first)
                options |= {"base_rows": base_rows, "data_dir": inputs.data_dir, "limit": inputs.limit}
                options["report"] = report
                found[name] = evaluation.evaluate_model(measured, tokenizer, suite, **options)
        cautions = _cautions(model, folders[model], inputs, trust_remote_code)
    said = notes[model]
    if baseline is not None:  # its context may be another, and so may be what of the suite it is measured on
        said = said + [f"--baseline {baseline}: {note}" for note in notes[baseline] if note not in said]
        if lengths[baseline] != lengths[model]:
            said = [*said, f"--baseline {baseline}: {OTHER_TOKENS}"]
    said = [*said, *cut_prompts(found), *cautions]
    return {"suite": suite.model_dump(mode="json"), "models": found, **({"notes": said} if said else {})}


def diagnose_model(model: Path, base: str | None, inputs: EvalInputs, *, processes: int = 1) -> dict[str, Any]:
    """`ablation.diagnose` of the linearized model `model`, and of its `base` where that is given. Raises BadInput."""
    require_linearized(model)
    unlike = None
    with local_model(base or str(model)) as folder, show_progress("diagnose") as report:
        check_folder(model)
        check_folder(folder)
        if base is not None:
            require_base(base, folder, model)
            unlike = unlike_base(base, folder, model)
        tokenizer = checkpoint.load_tokenizer(model)
        inputs.rehearse(model, tokenizer, has_base=base is not None)
        results = ablation.diagnose(
            model,
            folder if base is not None else None,
            inputs.suite,
            **inputs.documents(tokenizer, model),
            data_dir=inputs.data_dir,
            limit=inputs.limit,
            batch_size=inputs.batch_size,
            processes=processes,
            device=inputs.device,
            precision=inputs.precision,
            report=report,
        )
    notes = [*([unlike] if unlike is not None else []), *results.get("notes", []), *_cautions(model, model, inputs)]
    return results | ({"notes": notes} if notes else {})


def export_quantized(
    model: Path, out: Path, scheme: str, *, text: str | None, device: str, **options: Any
) -> dict[str, Any]:
    """`export_model` with weights of 8 bits, and on the held-out `text` what they cost; None measures nothing.

    scheme: a name in `quantization.SCHEMES`. Raises BadInput, before anything is written where that is possible.
    """
    refuse_existing(out)
    require_linearized(model)
    config = checkpoint.load_config(model)
    check_quantizable(config, model, scheme)
    where, measure = pick_device(device), None
    with show_progress("export") as report:
        if text is not None:
            tokenizer = checkpoint.load_tokenizer(model)
            ids_NT = windows_of_text(tokenizer, _held_out(text, tokenizer, model), config)

            def measure(folder: Path) -> dict[str, Any]:
                return {**quantization_loss(model, folder, ids_NT, where, report)}

        return export_model(model, out, quantize=scheme, measure=measure, progress=report, **options)


def _cautions(model: str | Path, folder: Path, inputs: EvalInputs, trust_remote_code: bool = False) -> list[str]:
    """Notes if `model`, in `folder`, may have been trained on what it was measured on, or if what a row is measured by
    depends on the rows that it shares a batch with."""
    notes, config = [], checkpoint.load_config(folder, trust_remote_code)
    has_run = (Path(model).parent / MANIFEST).exists()
    linearized = is_linearized(config)
    if linearized and has_run:
        notes += _trained_on(model, inputs)
    if inputs.text == PYDOC and inputs.needs_held_out and linearized and not has_run:
        notes.append(
            f"--text {PYDOC}: the model is not in the folder of a run, so it was measured on what a run with seed 0 "
            "and held_out 0.1 holds out; if the model was trained on that, give other text"
        )
    limit, rows = length_limit(config), inputs.batch_size
    if limit is not None and rows > 1:
        what = f"a row of more than {limit} tokens changes the rotary embedding of shorter ones in its batch"
        notes.append(f"--batch-size {rows}: {what}, by {config.model_type}'s rope_type; use 1 to exclude that")
    return notes


def _trained_on(model: str | Path, inputs: EvalInputs) -> list[str]:
    """A note for each text that is measured and that the run around `model` trained on, also from a file that is moved
    or copied since."""
    manifest = Manifest.read(Path(model).parent)
    try:
        recipe = Recipe.model_validate(manifest.recipe.get("resolved"))
    except ValidationError:  # an older version gave its fields other names
        return []
    measured: dict[str, FileSource | PydocSource] = {}
    if inputs.needs_held_out:
        of_run = _pydoc_of_run(model) if inputs.text == PYDOC else None
        measured["--text"] = of_run[0] if of_run is not None else text_source(inputs.text)
    if inputs.suite.needs_other and inputs.other_text is not None:  # all of it
        measured["--other-text"] = (
            PydocSource() if inputs.other_text == PYDOC else text_source(inputs.other_text, "--other-text")
        )
    texts = {"--text": inputs.text, "--other-text": inputs.other_text}
    return [
        f"{option} {texts[option]}: the run of the model trained on this text (data.{name}), so it is not held out; "
        "give other text"
        for option, source in measured.items()
        for name, trained in recipe.trained_on.items()
        if not trained.spares(source) or _shares_a_file(manifest.inputs, name, source)
    ]


def _shares_a_file(inputs: Mapping[str, str], name: str, measured: FileSource | PydocSource) -> bool:
    """Whether a file of `measured` was one of those of the source `name` that a run trained on. inputs: of its
    manifest."""
    known = {sha256 for file, sha256 in inputs.items() if file.startswith(f"data.{name}.path/")}
    found = files_in(Path(measured.path)) if isinstance(measured, FileSource) and known else []
    return any(is_data_file(file) and sha256_input(file) in known for file in found)


def _require_same_vocabulary(baseline: str, one: Any, other: Any) -> None:
    """Raises BadInput for a baseline with another vocabulary: the model cannot read the tokens that it writes."""
    # beyond its tokenizer's tokens a model has embeddings that it may write
    if one.get_vocab() != other.get_vocab() or getattr(one, "embeddings", 0) > getattr(other, "embeddings", math.inf):
        what = "has a different vocabulary from the model, so agreement with it cannot be measured"
        raise BadInput(f"--baseline {baseline}: {what}; choose a suite without agreement")


def _held_out(text: str, tokenizer: Any, model: str | Path) -> Sequence[Document]:
    """A whole file, or the part of Python's documentation that was held out by the run whose folder `model` is in.

    Without a run that trained on it, that is the part that a run with seed 0 and `held_out: 0.1` holds out.
    """
    if text != PYDOC:
        return load_source(text_source(text), tokenizer).train
    source, seed = _pydoc_of_run(model) or (text_source(PYDOC), 0)
    return load_source(source, tokenizer, seed=seed).held_out


def _pydoc_of_run(model: str | Path) -> tuple[PydocSource, int] | None:
    """The source of Python's documentation in the recipe of the run whose folder `model` is in, and the run's seed.
    None without such a run, and if its recipe holds none of that text out."""
    run = Path(model).parent
    if not (run / MANIFEST).exists():
        return None
    manifest = Manifest.read(run)
    for source in manifest.recipe.get("resolved", {}).get("data", {}).values():
        if source["source"] == PYDOC and source["held_out"]:
            return PydocSource(held_out=source["held_out"]), manifest.seed
    return None


def _suite(name: str, include_path: Path | None) -> suites.Suite:
    """The suite called `name`, with those of its tasks that the folder `include_path` has taken from there."""
    loaded = suites.load(name)
    if include_path is None:
        return loaded
    from liger_convert.eval.task_files import included_tasks  # lm-eval takes seconds to import

    return loaded.with_tasks_of(include_path, included_tasks(include_path, [task.name for task in loaded.tasks]))


def _other_text(text: str, other_text: str | None) -> str | None:
    """The text of another kind than `text`: the one that is given, or else Python's documentation, if that is one."""
    if other_text is not None and meet(text_source(other_text, "--other-text").places, text_source(text).places):
        raise BadInput(f"--other-text {other_text}: is the same text as --text; give text of another kind")
    return other_text or (PYDOC if text != PYDOC else None)


def _other(suite: suites.Suite, other_text: str | None, tokenizer: Any) -> Sequence[Document] | None:
    """All documents of `other_text`, where there is one and the suite reads it."""
    if other_text is None or not suite.needs_other:
        return None
    documents = load_source(text_source(other_text, "--other-text"), tokenizer)
    return documents.train + documents.held_out
