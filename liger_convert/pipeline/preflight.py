"""Tries before the training what would otherwise fail after it: generation, the suite, disk space, rates and lengths.

What would make the result unusable is refused; what costs quality or is merely unlikely is a warning, one sentence
each.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from transformers import GenerationConfig

from liger_convert.config.names import LONG, MAIN
from liger_convert.config.recipe import Recipe
from liger_convert.config.stages import Stage
from liger_convert.data.documents import Document, Documents
from liger_convert.eval.generation import encode
from liger_convert.eval.measures import text_stream
from liger_convert.eval.suites import Suite
from liger_convert.io import generation_config, templates
from liger_convert.io.files import scratch_folder
from liger_convert.io.generation_config import reason
from liger_convert.mixers.reach import reaches
from liger_convert.model import linearized_classes, linearized_config
from liger_convert.model.bases import context_length
from liger_convert.pipeline.plan import Plan, computes_in, measured_in_parts, too_large
from liger_convert.training import disk_estimate
from liger_convert.training.student import refusal
from liger_convert.utils.device import gpu_memory, gpus_for
from liger_convert.utils.errors import BadInput, counted
from liger_convert.utils.progress import Report

# Adam moves a weight by about the rate in each step. Float32 numbers near 1 are 6e-8 to 1.2e-7 apart: a step of less
# than 1e-8 is rounded away. Pretrained weights are of size 0.01 to 1: a step of more than 1 wipes them out.
LEAST_RATE, MOST_RATE, HIGH_RATE = 1e-8, 1.0, 0.1
LEAST_MOVE = 1e-6  # a weight's in all steps of a stage: less cannot be measured in the result
OFTEN = 4  # times that a text may be read: so far it is nearly as good as new text (arXiv 2305.16264)
REPEATS = 16  # from about here on, reading the same text again is worth little (arXiv 2305.16264)
UNKNOWN = 0.05  # fraction of the tokens that the tokenizer cannot read
FEW = 0.01  # fraction of the tokens that have context beyond the window
SHORT = 0.1  # the same where documents are concatenated: .01 has lost recall from far back, .75 has not (eval/LOG.md)
SILENT = 0.75  # fraction of the rows that hold no response
SPARSE = 6  # with fewer than one softmax layer in so many, only `copy` has chosen those of recall (eval/LOG.md)
TOKENS = 2  # how many the rehearsal generates


def check_recipe(recipe: Recipe, plan: Plan, config: Any, suite: Suite, processes: int | None = None) -> list[str]:
    """Warnings that follow from the recipe and the base's config, for a run of so many processes (None: of those that
    there are). Raises BadInput."""
    warnings = []
    positions = context_length(config)
    shapes = {n.removesuffix(".weight"): shape for n, shape in plan.reused_parameters.items() if len(shape) == 2}
    linearized = linearized_config(config, plan.linearization)
    room = gpu_memory() if recipe.device != "cpu" else None
    device, _ = computes_in(recipe)
    for i, stage in enumerate(plan.recipe_stages):
        where = f"stages[{i}]"
        warnings += _check_rates(stage, where, plan.stages[i].trained)
        if stage.lora is not None and (why := refusal(stage.lora, linearized, shapes)):
            raise BadInput(f"{where}.lora.{why}")
        warnings += _check_reach(recipe, stage, f"{where}.seq_len: rows of {stage.seq_len} tokens", stage.seq_len, plan)
        if positions is not None and stage.seq_len > positions:
            warnings.append(
                f"{where}.seq_len: {stage.seq_len} is more than the {positions} tokens that the base supports"
            )
    for name, teacher in recipe.teachers.items():
        if positions is not None and teacher.document_tokens > positions:
            said = f"{teacher.document_tokens} is more than the {positions} tokens that the base supports"
            warnings.append(f"data.{name}.document_tokens: {said}")
    choices = len(plan.layers) - len(plan.sliding)
    if plan.selected_by != "copy" and 0 < SPARSE * plan.undecided < choices:
        few = f"with so few softmax layers ({plan.undecided} of {choices})"
        seen = f"{plan.selected_by} has lost recall from far back in our runs, and copy has kept it"
        warnings.append(f"layers.select: {few}, {seen}")
    lengths = {text.metrics[0]: text.window for text in suite.text if text.score_from > 1}  # others are cut
    lengths |= {
        one.metrics[0]: 2 * one.length for copying in suite.copying if not copying.lengths for one in copying.each
    }
    for metric, length in lengths.items():
        if positions is not None and length > positions:
            said = f"{metric} reads {length} tokens, more than the {positions} that the base supports"
            warnings.append(f"suite {suite.name}: {said}, so the verdict does not use it")
    warnings += wider_windows(plan)
    warnings += too_large(plan, room, recipe.sharding)
    gpus = len(gpus_for(device)) if processes in (None, 1) else 1
    return warnings + measured_in_parts(plan, room, gpus)


def wider_windows(plan: Plan) -> list[str]:
    """A warning for each mixer whose window is longer than the base's own in a layer: attention there was never trained
    on tokens so far back."""
    warnings = []
    for name, spec in plan.linearization["mixers"].items():
        own = [window for window, mixer in zip(plan.sliding_windows, plan.layers, strict=True) if mixer == name]
        beyond = [window for window in own if window and not 0 < spec["window"] <= window]
        if beyond:
            where = {MAIN: "mixer", LONG: "layers.long_windows"}.get(name, f"mixers.{name}")
            said = f"{spec['window'] or 'unlimited'} is more than the {min(beyond)} tokens that the base attends to"
            layers = f"in {len(beyond)} of its layers (sliding_window)"
            warnings.append(f"{where}.window: {said} {layers}; use at most {min(beyond)}")
    return warnings


def check_documents(
    recipe: Recipe, plan: Plan, documents: Callable[[str], Documents], unknown: int | None = None
) -> list[str]:
    """Warnings about rows that are left out or weighted, tools and roles that no template shows, text that the
    tokenizer cannot read, documents that never or seldom leave the window, and sources that are read many times.
    unknown: the id of the tokenizer's unknown token, if it has one. Raises BadInput where no document of a stage leaves
    the window."""
    read = {name for stage in plan.recipe_stages for name in stage.sources} - recipe.teachers.keys()
    warnings = [
        f"data.{name}: {said}"
        for name in sorted(read)
        for said in _about_rows(documents(name), recipe.data[name].has_responses, unknown)
    ]
    short, reach = set[str](), reaches(plan.linearization)
    for i, stage in enumerate(plan.recipe_stages):
        where, sizes = f"stages[{i}]", {name: _sizes(recipe, documents, name) for name in stage.sources}
        warnings += _about_repeats(stage, where, sizes)
        if stage.responses_only:
            warnings += [
                f"{where}.{stage.where(name)}: {share:.0%} of the rows of {stage.seq_len:,} tokens of {name} hold "
                "no response, and nothing is learned from them; give longer rows or chats with shorter questions"
                for name in stage.sources
                if (share := _without_response(documents(name).train, stage.seq_len)) > SILENT
            ]
        if not _trains_mixers(stage) or not reach:
            continue
        if not stage.concat_documents and not stage.copy_fraction:
            warnings += _about_reach(recipe, stage, where, sizes, plan)
        names = " and ".join(sizes)
        beyond = _beyond(stage, sizes, min(reach))
        if stage.concat_documents and beyond < SHORT and names not in short:
            short.add(names)
            told = f"only {beyond:.1%} of the tokens of {names} have context of their own document beyond the window"
            why = "memories trained on such text have lost recall from far back in our runs"
            warnings.append(f"{where}.data: {told}, and {why}; give longer documents, or mix them in")
    return warnings


def _sizes(recipe: Recipe, documents: Callable[[str], Documents], name: str) -> list[int]:
    """The number of tokens of each document of a source that is trained on."""
    if name in recipe.teachers:
        source = recipe.teachers[name]
        return [source.document_tokens] * (source.documents - source.held_out_documents)
    return [len(document.ids) for document in documents(name).train]


def _about_rows(read: Documents, has_responses: bool, unknown: int | None) -> list[str]:
    """What is to be said about the rows of a source."""
    found, rows = [], len(read.train) + len(read.held_out)
    if read.skipped:
        why = ", or no question with an answer to learn" if has_responses else ""
        found.append(f"{read.skipped:,} of {rows + read.skipped:,} rows have no text{why}")
    if read.weighted:
        said = f"{read.weighted:,} of {rows:,} rows have a weight of their own, but all rows count alike"
        found.append(f"{said}; leave out rows that should not count, or remove the field weight")
    if read.hides_tools:
        said = "its rows have tools, but the base's chat template does not show them"
        found.append(f"{said}, so the model learns to call what it was not told of")
    if read.hidden_roles:
        roles = " and ".join(sorted(read.hidden_roles))
        said = f"the base's chat template does not show messages of the role {roles}"
        found.append(f"{said}, so the model learns to answer what it was not told of")
    if unknown is not None and (share := _share_of(unknown, read.train)) > UNKNOWN:
        said = f"{share:.0%} of its tokens are the unknown token of the base's tokenizer, which cannot read this text"
        found.append(f"{said}; give text in a language that the base knows")
    return found


def _about_repeats(stage: Stage, where: str, sizes: Mapping[str, list[int]]) -> list[str]:
    """A warning for each source that the stage reads so often that reading it again is worth little."""
    warnings = []
    for name, tokens in ((name, sum(of_source)) for name, of_source in sizes.items()):
        times = stage.sources[name] * stage.tokens / max(tokens, 1)
        if times > (OFTEN if len(sizes) > 1 else REPEATS):
            said = f"{name} has {tokens:,} tokens, so the stage reads it {times:,.1f} times"
            instead = "a smaller fraction" if len(sizes) > 1 else "the stage fewer tokens"
            warnings.append(f"{where}.{stage.where(name)}: {said}; give it more text or {instead}")
    return warnings


def _about_reach(recipe: Recipe, stage: Stage, where: str, sizes: Mapping[str, list[int]], plan: Plan) -> list[str]:
    """Warnings about documents of rows of their own that never or seldom leave the window. Raises BadInput where none
    does."""
    warnings = []
    cut = {name: [min(size, stage.seq_len) for size in of_source] for name, of_source in sizes.items()}
    names, longest = " and ".join(cut), max(max(of_source) for of_source in cut.values())
    if longest < stage.seq_len:  # else the rows have been told
        said = f"{where}.data: documents of {names}, of at most {longest} tokens,"
        warnings += _check_reach(recipe, stage, said, longest, plan)
    beyond = _beyond(stage, cut, min(reaches(plan.linearization)))
    if 0 < beyond < FEW:
        told = f"only {beyond:.2%} of the tokens of {names} have any context beyond the window"
        warnings.append(f"{where}.data: {told}; the memory learns from these only, so give longer documents")
    return warnings


def _beyond(stage: Stage, sizes: Mapping[str, list[int]], window: int) -> float:
    """The fraction of a stage's tokens with context of their own document beyond the window. sizes: of the documents
    of each of its sources."""
    return sum(
        stage.sources[name] * sum(max(0, size - window) for size in of_source) / max(sum(of_source), 1)
        for name, of_source in sizes.items()
    )


def _trains_mixers(stage: Stage) -> bool:
    return "mixer" in stage.learning_rates.trained()


def _without_response(documents: Sequence[Document], seq_len: int) -> float:
    """The fraction of rows without a token that counts in a loss on responses, were the documents cut one after the
    other."""
    loss_N = np.concatenate([document.loss for document in documents])
    return 1 - float(np.logical_or.reduceat(loss_N, np.arange(0, len(loss_N), seq_len)).mean())


def _check_measured(recipe: Recipe, suite: Suite, documents: Callable[[str], Documents]) -> list[str]:
    """A warning for each text whose measured documents are also trained on, from another source. Within a source, equal
    texts are kept out of the training."""
    warnings, measured = [], {}
    trained = [name for name in recipe.trained_on if name not in recipe.teachers]
    if recipe.eval.text is not None and suite.needs_held_out(has_other=recipe.other_source is not None):
        measured["eval.text"] = recipe.eval.text
    if recipe.eval.other_text is not None and suite.needs_other:
        measured["eval.other_text"] = recipe.eval.other_text
    for field, name in measured.items():
        if name in recipe.teachers:
            continue
        read = documents(name)
        keys = [d.ids.tobytes() for d in (read.held_out if field == "eval.text" else [*read.train, *read.held_out])]
        distinct = set(keys)
        for other in [source for source in trained if source != name]:
            both = distinct.intersection(document.ids.tobytes() for document in documents(other).train)
            if again := sum(key in both for key in keys):
                told = f"{again:,} of the {len(keys):,} documents of {name} that are measured are also in {other}"
                warnings.append(f"{field}: {told}, which is trained on; take them out of one of the two")
    return warnings


def _share_of(token: int, documents: Sequence[Document]) -> float:
    """The fraction of the documents' tokens that are `token`."""
    tokens = sum(len(document.ids) for document in documents)
    return sum(int((document.ids == token).sum()) for document in documents) / max(tokens, 1)


def _unknown_token(tokenizer: Any) -> int | None:
    """The id of what a tokenizer writes for what it cannot read; None where that also begins, ends or pads a text."""
    unknown: int | None = tokenizer.unk_token_id
    return unknown if unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) else None


def check_disk(plan: Plan, out: Path, *, keep_steps: bool = False) -> None:
    """Raises BadInput when the run cannot fit on the disk of `out`, where a base that must be unpacked already is."""
    needed = disk_estimate.peak(list(plan.writes), keep_steps=keep_steps, without_base=True)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise BadInput(
            f"{out}: the run needs {decimal(needed)} of disk at its peak, but only {decimal(free)} are free; "
            "free some space, or name a folder on another disk"
        )


def check_held_out(
    recipe: Recipe,
    suite: Suite,
    documents: Callable[[str], Documents],
    other: Sequence[Document] | None,
) -> None:
    """Raises BadInput where the text that `suite` measures is too short: what is held out, or `other`, of another kind
    than is trained on."""
    if (text := recipe.eval.text) is not None:
        if text in recipe.teachers:
            held_out = recipe.teachers[text].held_out_tokens
        else:
            held_out = len(text_stream(documents(text).held_out))
        if held_out < suite.text_tokens():
            needed = f"suite {suite.name} needs {suite.text_tokens()}"
            raise BadInput(f"data.{text}: {held_out} tokens are held out, but {needed}; hold out more")
    if other is not None:
        tokens, needed_tokens = len(text_stream(other)), suite.text_tokens("other")
        if tokens < needed_tokens:
            what = f"has {tokens} tokens, but suite {suite.name} needs {needed_tokens}"
            raise BadInput(f"data.{recipe.eval.other_text}: {what}; name a longer text")


def check_generation(
    base_dir: Path, config: Any, tokenizer: Any, linearization: Mapping[str, Any], prompts: Sequence[str]
) -> list[str]:
    """Generates, as the run will do at its end, with a model of random weights that has the final model's classes and
    vocabulary, and with the base's chat template and generation config. Returns warnings.

    Raises BadInput naming chat_template.jinja, tokenizer_config.json or generation_config.json.
    """
    for prompt in prompts:
        _check_prompt(base_dir, tokenizer, prompt)
    if (given := generation_config.read(base_dir, config.vocab_size)) is None:
        return []
    path = base_dir / generation_config.FILE
    warnings = _odd_tokens(path, given, config.vocab_size)
    model = _tiny(config, linearization)
    if model is None:
        return warnings

    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}

    def attempt(settings: GenerationConfig) -> Exception | None:
        model.generation_config = settings
        try:
            with scratch_folder() as folder:
                settings.save_pretrained(folder)  # as each stage and the merge do with the model
            model.generate(torch.tensor([encode(tokenizer, prompts[0], chat=True)]), max_new_tokens=TOKENS, **greedy)
        except Exception as error:  # whatever generation makes of settings that it cannot use
            return error
        return None

    plain = GenerationConfig()  # type: ignore[no-untyped-call]
    if (failure := attempt(given)) is not None and attempt(plain) is None:
        raise BadInput(f"{path}: a linearized model cannot generate with it: {reason(failure)}") from failure
    return warnings


def check_tasks(
    suite: Suite, config: Any, tokenizer: Any, data_dir: Path | None, limit: int | None, report: Report
) -> None:
    """Runs the suite's tasks without a model: reads their data, writes their prompts, scores answers.

    Raises BadInput for data that is not available or does not fit, a metric or shots that do not exist, hidden labels,
    and answers longer than the base's context.
    """
    if tasks := suite.tasks_for(data_dir):
        from liger_convert.eval.harness import rehearse_tasks  # lm-eval takes seconds to import

        positions = context_length(config)
        rehearse_tasks(tasks, tokenizer, data_dir=data_dir, limit=limit, positions=positions, report=report)


def _check_rates(stage: Stage, where: str, trained: int) -> list[str]:
    """Raises BadInput for rates that change nothing or destroy everything."""
    warnings, warmup = [], round(stage.warmup_ratio * stage.steps)
    for group, rate in stage.learning_rates.trained().items():
        at = f"{where}.learning_rates.{group}"
        if rate < LEAST_RATE:
            raise BadInput(f"{at}: steps of {rate:g} are rounded away in float32 weights; use at least {LEAST_RATE:g}")
        if rate > MOST_RATE:
            raise BadInput(f"{at}: steps of {rate:g} wipe out weights below 1; use at most {MOST_RATE:g}")
        if rate * stage.weight_decay >= 1:
            raise BadInput(
                f"{where}.weight_decay: times the rate of {group} it is at least 1, which erases the weights"
            )
        if rate > HIGH_RATE:
            warnings.append(f"{at}: {rate:g} is high; it wipes out weights of the usual size in a few steps")
        if rate * stage.steps < LEAST_MOVE:
            moves = f"move{'s' * (stage.steps == 1)} no weight by more than {rate * stage.steps:g}"
            warnings.append(f"{at}: {counted(stage.steps, 'step')} of {rate:g} {moves}")
    if warmup >= stage.steps:
        if stage.steps == 1:
            raise BadInput(
                f"{where}.warmup_ratio: the only step is a warm-up step at rate 0, which learns nothing; use 0"
            )
        warnings.append(
            f"{where}.warmup_ratio: covers all {stage.steps} steps, so rates reach their peak only in the last"
        )
    if stage.max_grad_norm / max(trained, 1) ** 0.5 < LEAST_RATE:
        why = f"{stage.max_grad_norm:g} makes gradients so small that Adam's epsilon determines the steps"
        warnings.append(f"{where}.max_grad_norm: {why}")
    return warnings


def _check_reach(recipe: Recipe, stage: Stage, said: str, length: int, plan: Plan) -> list[str]:
    """Warnings about a stage that trains mixers on texts of `length` tokens. Raises BadInput when no memory is ever
    read. The layers of `layers.long_windows` are left to stages with longer rows."""
    left = None if recipe.long_windows is None else LONG
    reach = reaches(plan.linearization | {"layers": [name for name in plan.layers if name != left]})
    if not _trains_mixers(stage) or not reach or length > max(reach):
        return []
    if length <= min(reach):
        why = f"{said} never reach beyond the window and its sinks ({min(reach)} tokens), so no memory is learned"
        raise BadInput(f"{why}; use more than {min(reach)}")
    return [
        f"{said} never reach beyond the longest window and its sinks ({max(reach)} tokens), "
        "so its memory learns nothing"
    ]


def _check_prompt(base_dir: Path, tokenizer: Any, prompt: str) -> None:
    try:
        ids = encode(tokenizer, prompt, chat=True)
    except Exception as error:  # a template is a program of its own
        what = f"a prompt with one user turn cannot be built: {reason(error)}"
        raise BadInput(f"{templates.file_in(base_dir)}: {what}") from None
    if not ids:
        raise BadInput(f"{templates.file_in(base_dir)}: the chat template produces nothing for one user turn")


def _odd_tokens(path: Path, given: GenerationConfig, vocabulary: int) -> list[str]:
    """A warning for each special token outside the vocabulary that does not end a text."""
    others = {"pad_token_id": given.pad_token_id, "bos_token_id": given.bos_token_id}
    return [
        f"{path.name}: {name} is {token!r}, which is not one of the {vocabulary} tokens"
        for name, token in others.items()
        if token is not None and not (type(token) is int and 0 <= token < vocabulary)
    ]


def _tiny(config: Any, linearization: Mapping[str, Any]) -> Any:
    """A linearized model of random weights and the base's vocabulary, with a layer of each kind; None where a family's
    config cannot be made so small."""
    layers = linearization["layers"]
    kept = sorted({layers.index(name) for name in layers})
    small = copy.deepcopy(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {"num_hidden_layers": len(kept), "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes |= {"hidden_size": dim, "intermediate_size": 16, "moe_intermediate_size": 16}
    for name, value in sizes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    for name in ("layer_types", "no_rope_layers"):
        if isinstance(every := getattr(small, name, None), list):
            setattr(small, name, [every[i] for i in kept])
    try:
        made = linearized_config(small, {**linearization, "layers": [layers[i] for i in kept]})
        with torch.random.fork_rng(devices=[]):
            return linearized_classes(config.model_type)[2](made).eval()
    except Exception:  # sizes that some family ties to others; the full model is built by the plan, and tells the rest
        return None


def check(
    recipe: Recipe,
    plan: Plan,
    *,
    base_dir: Path,
    config: Any,
    tokenizer: Any,
    suite: Suite,
    data_dir: Path | None,
    documents: Callable[[str], Documents],
    prompts: Sequence[str],
    out: Path,
    keep_steps: bool,
    report: Report,
) -> list[str]:
    """All checks of a run whose data has been read, and of which only the base has been written. Returns warnings.

    suite: what of the recipe's suite will be measured, see `eval.narrow`.
    Raises BadInput for what would fail later, or end in a result of no use.
    """
    warnings = check_recipe(recipe, plan, config, suite)
    check_disk(plan, out, keep_steps=keep_steps)
    warnings += check_generation(base_dir, config, tokenizer, plan.linearization, prompts)
    warnings += check_documents(recipe, plan, documents, _unknown_token(tokenizer))
    warnings += _check_measured(recipe, suite, documents)
    check_tasks(suite, config, tokenizer, data_dir, recipe.eval.limit, report)
    return warnings
