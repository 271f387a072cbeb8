"""Adapts a recipe's windows and stages to a base and a machine that it was not written for.

The rules. Each applies only if needed, and each change is reported in a sentence in the plan and the report:

- Rows are no longer than the context that the base was made for, because a teacher's output beyond it is noise. They
  are halved until they fit, and a step gets more of them, so that it has as many tokens as before.
- A window is at most an eighth of that context, and that of `layers.long_windows` at most `adapt.longest_window` of it,
  a quarter by default. A window as long as the texts would leave nothing for the memory. Rows of `mixed_seq_lens` that
  never leave the window get shorter with it. If all layers of the base have windows of their own, none becomes longer.
- `layers.long_windows` has twice the window on a base with at least four times the context that it was tuned on. On
  such a base, what a conversion loses grows with the position, and a longer window is a smaller part of the cache
  (eval/LOG.md, Qwen2.5-Coder-1.5B).
- If at least half of the base's layers have sliding windows of their own, as in Gemma 3, the few others carry all that
  is farther back. So a fraction of `layers.softmax_auto` keeps at least a tenth of all layers, chosen by copying, and
  each of the few that becomes linear gets the window of `layers.long_windows`. Rows that would no longer leave the
  window become longer, and a step gets fewer of them.
- Adapters replace training the base's own weights. At equal tokens they lose less of what the training text does not
  cover (eval/LOG.md, TinyLlama-1.1B), and as much of the rest (SmolLM2-135M). Their learning rate is proportional to
  the scale of the base's weights (`io.weight_scale`). Adam moves every entry of an adapter by about the rate, whatever
  the base, so a step changes small weights more than large ones. The mixers' rates stay, because mixers are new.
- If all weights are trained, the learning rates of the base's own weights fall as 1 / hidden size on a base wider than
  the one they were tuned on, as Adam requires for matrices (maximal update parametrization, 2203.03466, table 8).
- A stage must fit the GPU. First micro-batches are split, then activations are recomputed in the backward pass. If that
  is not enough, an alignment of whole rows is trained layer by layer. Otherwise adapters replace training the base's
  own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.filesize import decimal

from liger_convert.config.adapt import Adapt
from liger_convert.config.names import LONG, MAIN
from liger_convert.config.recipe import Recipe
from liger_convert.config.stages import AlignStage, AnyStage, Stage
from liger_convert.model.bases import context_length
from liger_convert.model.families import own_windows, sliding_layers
from liger_convert.pipeline.stage_plan import StagePlanner

MUCH_LONGER = 4  # times the context that longer windows were tuned on: then they double
SHORT = 1 / 8  # of the base's context: the longest window but for those of `layers.long_windows`
FAR = 0.1  # of all layers that see all tokens: the smallest fraction that kept what is far back (docs/results.md)
MOST = 5.0  # the largest scale of weights that raises the adapters' rate in proportion; no base tried has more
OWN = ("attention", "body", "embeddings")  # the groups of the base's own weights


def adapt(
    recipe: Recipe,
    base_config: Any,
    planner: StagePlanner,
    windows: tuple[int, int],
    scale: float | None,
) -> tuple[Recipe, tuple[str, ...]]:
    """`recipe` with its stages adapted to the base, and a sentence for each change. Unchanged if the recipe has no
    `adapt`.

    windows: that of `mixer` in the recipe, and as `fit_windows` has fitted it. scale: of the base's weights
    (`io.weight_scale`); None if it is not known.
    """
    if recipe.adapt is None:
        return recipe, ()
    context, room = context_length(base_config), _room(recipe.adapt, planner.device)
    options = _at_scale(recipe.adapt, scale)
    stages: list[AnyStage] = []
    sentences: list[str] = []
    tuned, hidden = options.hidden_size, base_config.hidden_size
    by_layer = recipe.sequence_parallel == 1
    for i, written in enumerate(recipe.stages):
        stage, said = _fit_longer_window(written, *windows)
        stage, shorter = _fit_short_rows(stage, *windows)
        stage, fitted = _fit_rows(stage, context)
        said = [*said, *shorter, *fitted]
        if options.trained == "mixers" and _trains_own(stage) and stage.learning_rates.mixer is not None:
            stage = _mixers_alone(stage)
            said = [*said, "learning_rates: only those of the mixers, as set in adapt.trained"]
        elif options.trained != "weights" and _trains_own(stage):
            stage = _with_adapters(stage, options)
            said = [*said, _adapters(stage)]
        stage, smaller = _fit_memory(stage, options, room, lambda stage: planner.plan(stage).memory_bytes, by_layer)
        stage, scaled = _scale_rates(stage, tuned, hidden)
        stages.append(stage)
        sentences += [f"stages[{i}].{sentence}" for sentence in (*said, *smaller, *scaled)]
    if any(stage.lora and not written.lora for stage, written in zip(stages, recipe.stages, strict=True)):
        sentences.insert(0, _scaled(options, scale))
    return recipe.with_stages(stages), tuple(sentences)


def fit_windows(recipe: Recipe, base_config: Any, specs: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The resolved mixers `specs` of `recipe` with windows that fit the base's context, and a sentence for each change.
    Unchanged if the recipe has no `adapt`."""
    if recipe.adapt is None:
        return specs, ()
    fitted, sentences = _fit_to_base(recipe, base_config, specs, recipe.adapt.longest_window)
    depth, sliding = _sliding(base_config)
    if sliding and (window := _longer_window(fitted)):
        written = specs[MAIN]["window"]
        fitted[MAIN] = specs[MAIN] | {"window": window}
        sentences.pop(MAIN, None)
        if window != written:
            sentences[MAIN] = f"mixer.window: {window} in place of {written}, {_because_of_sliding(depth, sliding)}"
    return fitted, tuple(sentences.values())


def fit_long_windows(recipe: Recipe, base_config: Any) -> tuple[Recipe, tuple[str, ...]]:
    """`recipe` with a longer window in `layers.long_windows` if the base's context is much longer than the one it was
    tuned on, and a sentence that says so. Unchanged if these layers are not given as a fraction, if rows would be too
    short to train what leaves the window, and for bases of whose layers at least half have sliding windows."""
    tuned = None if recipe.adapt is None else recipe.adapt.context
    windows, context = recipe.long_windows, context_length(base_config)
    if tuned is None or windows is None or isinstance(windows.layers, list) or context is None:
        return recipe, ()
    window = 2 * windows.window
    rows = max((stage.seq_len for stage in recipe.stages), default=0)
    slides = _sliding(base_config)[1] or None not in own_windows(base_config)
    if context < MUCH_LONGER * tuned or windows.layers >= 1 or rows < 2 * window or slides:
        return recipe, ()
    longer = recipe.with_layer_choice(long_windows=windows.model_copy(update={"window": window}))
    why = f"because the base was made for {context:,} tokens and adapt.context is {tuned:,}"
    return longer, (f"layers.long_windows.window: {window:,} in place of {windows.window:,}, {why}",)


def fit_layers(recipe: Recipe, base_config: Any) -> tuple[Recipe, tuple[str, ...]]:
    """`recipe` with a choice of softmax layers for a base of whose layers most have windows of their own, and a
    sentence for each change. Unchanged if the recipe has no `adapt`, or chooses no layers by measurement."""
    depth, sliding = _sliding(base_config)
    share, full = recipe.softmax_auto, depth - sliding
    if recipe.adapt is None or share is None or not sliding:
        return recipe, ()
    changes: dict[str, Any] = {}
    least = min(round(FAR * depth), full - 1)
    if share < 1 and max(1, int(share * full)) < least:
        changes["softmax_auto"] = (least, f"{least} of the other {full} in place of {share:g}")
    if recipe.selected_by == "kl":  # its rows are too short to show what is lost beyond the windows
        changes["select"] = ("copy", "copy in place of kl")
    why = _because_of_sliding(depth, sliding)
    sentences = tuple(f"layers.{field}: {said}, {why}" for field, (_, said) in changes.items())
    return recipe.with_layer_choice(**{field: value for field, (value, _) in changes.items()}), sentences


def _fit_to_base(
    recipe: Recipe, base_config: Any, specs: dict[str, Any], longest: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """`specs` with windows that leave something to the memory in the base's context, and that are no longer than the
    base's own windows if all of its layers have one. With a sentence by the name of each mixer that is changed."""
    context, own = context_length(base_config), own_windows(base_config)
    sees = 0 if None in own else min(filter(None, own), default=0)
    fitted, sentences = dict(specs), {}
    for name, spec in specs.items():
        where, share = "mixer" if name == MAIN else f"mixers.{name}", SHORT
        if name == LONG and recipe.long_windows is not None:
            where, share = "layers.long_windows", longest
        limits = []
        if context is not None:
            most = 1 << max(0, int(context * share).bit_length() - 1)  # a power of two
            limits.append((most, f"because the base was made for {context:,} tokens"))
        if sees:
            limits.append((sees, f"because a layer of the base sees only {sees:,} tokens"))
        most, why = min(limits, default=(spec["window"], ""))
        if spec["window"] > most:
            fitted[name] = spec | {"window": most}
            sentences[name] = f"{where}.window: {most} in place of {spec['window']}, {why}"
    return fitted, sentences


def _longer_window(specs: dict[str, Any]) -> int:
    """The window of `layers.long_windows`; 0 if there is none that is longer than that of `mixer`."""
    if LONG not in specs:
        return 0
    window, long = specs[MAIN]["window"], specs[LONG]["window"]
    return long if 0 < window < long else 0


def _because_of_sliding(depth: int, sliding: int) -> str:
    return f"because {sliding} of the base's {depth} layers have windows of their own"


def _sliding(base_config: Any) -> tuple[int, int]:
    """How many layers the base has, and how many of them have a sliding window of their own: 0 unless at least half do,
    but not all."""
    windows = own_windows(base_config)
    depth, sliding = len(windows), len(sliding_layers(windows))
    return depth, sliding if depth / 2 <= sliding else 0


def changed(stage: AnyStage, **fields: Any) -> AnyStage:
    """`stage` with other values in these fields, validated like those of a recipe."""
    return type(stage).model_validate(stage.model_dump() | fields)


def _fit_longer_window(stage: AnyStage, written: int, fitted: int) -> tuple[AnyStage, list[str]]:
    """Lengthens rows that left a window of `written` tokens and do not leave one of `fitted`."""
    length, fewer = stage.seq_len, 1
    while written < length <= fitted:
        length, fewer = length * 2, fewer * 2
    if fewer == 1:
        return stage, []
    rows = max(1, stage.batch_size // fewer)
    why = f"because the window is {fitted:,} in place of {written:,}"
    said = f"seq_len: {length:,} in place of {stage.seq_len:,}, {why}; batch_size {rows} in place of {stage.batch_size}"
    return changed(stage, seq_len=length, batch_size=rows), [said]


def _fit_short_rows(stage: AnyStage, written: int, fitted: int) -> tuple[AnyStage, list[str]]:
    """Shortens mixed rows that never leave a window of `written` tokens, where it has become one of `fitted`."""
    others, sentences = stage.model_dump()["mixed_seq_lens"], []
    for other in others:
        longer = other["seq_len"]
        length = longer * fitted // written if fitted < written and longer <= written else 0
        if length > 1 and stage.seq_len % length == 0:
            why = f"because the window is {fitted:,} in place of {written:,}"
            sentences.append(f"mixed_seq_lens: rows of {length:,} in place of {longer:,}, {why}")
            other["seq_len"] = length
    return (changed(stage, mixed_seq_lens=others) if sentences else stage), sentences


def _fit_rows(stage: AnyStage, context: int | None) -> tuple[AnyStage, list[str]]:
    if context is None or stage.seq_len <= context:
        return stage, []
    length, more = stage.seq_len, 1
    while length > context:
        length, more = length // 2, more * 2
    others = stage.model_dump()["mixed_seq_lens"]
    shorter = [other for other in others if length % other["seq_len"] == 0 and other["seq_len"] < length]
    said = (
        f"seq_len: {length:,} in place of {stage.seq_len:,}, because the base was made for {context:,} tokens; "
        f"batch_size {stage.batch_size * more} in place of {stage.batch_size}"
    )
    if gone := ", ".join(f"{other['seq_len']:,}" for other in others if other not in shorter):
        said += f"; mixed_seq_lens without {gone}"
    return changed(stage, seq_len=length, batch_size=stage.batch_size * more, mixed_seq_lens=shorter), [said]


def _scale_rates(stage: AnyStage, tuned: int, hidden: int) -> tuple[AnyStage, list[str]]:
    rates = stage.learning_rates.trained()
    own = [name for name in OWN if name in rates]
    if hidden <= tuned or not own:
        return stage, []
    scaled = {name: float(f"{rates[name] * tuned / hidden:.3g}") for name in own}
    listed = ", ".join(f"{name} {rate:g} in place of {rates[name]:g}" for name, rate in scaled.items())
    said = f"learning_rates: {listed}, scaled to the hidden size of {hidden:,} instead of {tuned:,}"
    return changed(stage, learning_rates=rates | scaled), [said]


def _fit_memory(
    stage: AnyStage,
    options: Adapt,
    room: int | None,
    peak: Callable[[Stage], int],
    by_layer: bool,
) -> tuple[AnyStage, list[str]]:
    if room is None or peak(stage) <= room:
        return stage, []
    full = next((made for made in _smaller(stage) if peak(made) <= room), None)
    if full is not None:
        return full, [_said(stage, full, room)]
    if by_layer and isinstance(stage, AlignStage) and (stage.lora is None or stage.lora.targets == "attention"):
        one = changed(stage, layerwise=True)
        fitting = next((made for made in (one, *_smaller(one)) if peak(made) <= room), None)
        if fitting is not None:
            return fitting, [_said(stage, fitting, room)]
    adapters = _with_adapters(stage, options)
    *others, smallest = [adapters, *_smaller(adapters)]
    fitting = next((made for made in others if peak(made) <= room), smallest)
    return fitting, [_said(stage, fitting, room)]


def _smaller(stage: AnyStage) -> list[AnyStage]:
    """The same optimizer steps in less and less memory: smaller micro-batches, then recomputed activations."""
    split = [stage]
    while split[-1].batch_size % 2 == 0:
        last = split[-1]
        split.append(changed(last, batch_size=last.batch_size // 2, grad_accumulation=last.grad_accumulation * 2))
    return [*split[1:], *(changed(made, gradient_checkpointing=True) for made in split)]


def _trains_own(stage: Stage) -> bool:
    """Whether the stage trains weights of the base rather than adapters."""
    return any(name in stage.learning_rates.trained() for name in OWN)


def _mixers_alone(stage: AnyStage) -> AnyStage:
    rates = stage.learning_rates.trained()
    return changed(stage, learning_rates={name: rate for name, rate in rates.items() if name not in OWN})


def _at_scale(options: Adapt, scale: float | None) -> Adapt:
    """`options` with the adapters' learning rate for weights of this scale; unchanged if it is not known."""
    rate = float(f"{options.lora_rate * min(scale or 1.0, MOST):.3g}")
    return options.model_copy(update={"lora_rate": rate})


def _scaled(options: Adapt, scale: float | None) -> str:
    if scale is None:
        return f"adapt.lora_rate: {options.lora_rate:g} times the scale of the base's weights, which a run measures"
    return f"adapt.lora_rate: {options.lora_rate:g}, because the base's weights have a scale of {scale:.2f}"


def _with_adapters(stage: AnyStage, options: Adapt) -> AnyStage:
    if not _trains_own(stage):
        return stage
    lora = {
        "variant": options.lora_variant,
        "rank": options.lora_rank,
        "alpha": float(options.lora_rank) if options.lora_alpha is None else options.lora_alpha,
        "targets": "attention" if isinstance(stage, AlignStage) else "all",
    }
    kept = {name: rate for name, rate in stage.learning_rates.trained().items() if name not in OWN}
    return changed(stage, lora=lora, learning_rates=kept | {"lora": options.lora_rate})


def _adapters(stage: Stage) -> str:
    assert stage.lora is not None
    rate, lora = f"{stage.learning_rates.lora:g}", stage.lora
    kind = "" if lora.variant == "lora" else f"{lora.variant}, "
    alpha = "" if lora.alpha == lora.rank else f" and alpha {lora.alpha:g}"
    return f"lora: {kind}rank {lora.rank}{alpha} on {lora.targets} at {rate}, in place of the base's own weights"


def _said(before: AnyStage, after: AnyStage, room: int) -> str:
    """The changes, as fields of a recipe: `batch_size: 2 in place of 8, …, to fit …`."""
    fields = []
    if after.lora is not None and before.lora is None:
        fields.append(_adapters(after))
    for name in ("layerwise", "batch_size", "grad_accumulation", "gradient_checkpointing"):
        old, new = getattr(before, name, None), getattr(after, name, None)
        if old != new:
            fields.append(f"{name}: {str(new).lower()} in place of {str(old).lower()}")
    return f"{', '.join(fields)}, to fit {decimal(room)} of GPU memory"


def _room(options: Adapt, device: torch.device) -> int | None:
    """The bytes that a stage may take on a GPU; None (no limit) on a CPU."""
    if device.type != "cuda":
        return None
    return int(options.gpu_memory * torch.cuda.get_device_properties(device).total_memory)
