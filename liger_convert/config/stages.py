"""The training stages of a recipe: align, distill and finetune, and what they share."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from liger_convert.config.fields import (
    Count,
    Fraction,
    Length,
    Rate,
    Rows,
    Strict,
    Temperature,
    Tokens,
    Weight,
    between,
    refuse,
    whole,
)


class LearningRates(Strict):
    """Peak learning rate of each parameter group; a group without one is frozen."""

    mixer: Rate | None = None
    """The new parameters: gates, feature maps, codes, and how the memory and the window are combined."""
    attention: Rate | None = None
    """The attention projections, and norms of queries and keys, of linearized layers."""
    body: Rate | None = None
    """The other weights of the layers: MLPs, norms, and all attention of layers that stay softmax."""
    embeddings: Rate | None = None
    """The token embeddings and the output head."""
    lora: Rate | None = None
    """The adapters of the stage's `lora`."""

    def trained(self) -> dict[str, float]:
        return {name: rate for name, rate in self.model_dump().items() if rate is not None}


Rank = Annotated[int, BeforeValidator(whole), between(1, 1 << 16)]  # no projection has a larger rank
Alpha = Annotated[float, between(1e-6, 1e6)]


def _lora_targets(value: object) -> object:
    names = isinstance(value, list) and value and all(isinstance(v, str) for v in value)
    if value not in ("attention", "linearized", "all") and not names:
        refuse("", "should be attention, linearized, all, or a list of projection names such as [q_proj, v_proj]")
    return value


DECAYS_BASE = "would shrink the base itself, which pissa's adapters start from, so set it to 0"
Variant = Literal["lora", "rslora", "dora", "pissa"]


class Lora(Strict):
    """Low-rank adapters, which are trained instead of the base's own weights and merged into them afterwards."""

    variant: Variant = "lora"
    """`lora`; `rslora`, which scales by alpha / √rank, so that adapters of high rank learn as fast (2312.03732);
    `dora`, which also trains the norm of each row of a projection (2402.09353); or `pissa`, which starts from the
    base's largest singular vectors and values (2404.02948). With `pissa` part of the base is in the adapters, so
    dropout and weight decay are refused."""
    rank: Rank = 8
    """Rank of each adapter. With `pissa`, the saved adapter has twice this rank, because it holds the change of the
    base."""
    alpha: Alpha = 16.0
    """The output of an adapter is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Fraction of an adapter's inputs that is dropped in training."""
    targets: Annotated[Literal["attention", "linearized", "all"] | list[str], BeforeValidator(_lora_targets)] = (
        "attention"
    )
    """`attention`: the attention projections of the linearized layers. `linearized`: the projections of attention and
    MLP in these layers. `all`: the same in all layers. Or a list of projections, in all layers."""

    @model_validator(mode="after")
    def _keeps_the_base(self) -> Lora:
        if self.variant == "pissa" and self.dropout:
            refuse("dropout", "would drop parts of the base itself, which pissa's adapters start from, so set it to 0")
        return self


def _mix(value: object) -> object:
    """Refuses, naming the source, what is neither a name nor fractions by name."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        refuse("", "should be the name of a source, or fractions by name such as {text: 0.7, chat: 0.3}")
    for name, fraction in value.items():
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            refuse(name, f"should be a fraction of the tokens, above 0 and below 1, not {fraction!r}")
    if not math.isclose(total := math.fsum(value.values()), 1, abs_tol=1e-6):
        refuse("", f"its fractions add up to {total:g} and should add up to 1")
    return value


Mix = Annotated[str | dict[str, float], BeforeValidator(_mix)]


class MixedSeqLen(Strict):
    """A second row length of a stage, and the fraction of its micro-batches that use it."""

    section = "mixed_seq_lens"

    seq_len: Length
    """Tokens per row; must divide the stage's own `seq_len`."""
    fraction: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the micro-batches whose rows are cut to this length."""


class Stage(Strict):
    """The fields that all three kinds of stages share."""

    section = "stages"

    kind: str
    """What to learn: align, distill or finetune."""
    data: Mix
    """Name of the source under `data:` to train on, or several sources, each with its fraction of the tokens, such as
    `{text: 0.7, chat: 0.2, own: 0.1}`. The fractions add up to 1. Each row comes from one source."""
    tokens: Tokens
    """Tokens to train on, rounded down to whole optimizer steps; a source that runs out is read again."""
    seq_len: Length = 512
    """Tokens per row."""
    batch_size: Rows = 4
    """Rows per micro-batch."""
    grad_accumulation: Rows = 1
    """Micro-batches per optimizer step."""
    learning_rates: LearningRates
    """Peak learning rate of each parameter group; a group without one is frozen."""
    lora: Lora | None = None
    """Train low-rank adapters instead of the base's own weights."""
    warmup_ratio: Fraction = 0.05
    """Fraction of the steps in which the learning rates rise from 0."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """How the learning rates fall after the warm-up."""
    weight_decay: Annotated[float, between(0, 100)] = 0.0
    """AdamW's weight decay; applies only to the base's matrices and to adapters."""
    max_grad_norm: Annotated[float, between(1e-9, 1e12)] = 1.0
    """Gradients with a larger norm are scaled down to this one; a very large number turns this off."""
    ema_length: Fraction = 0.0
    """Above 0, the result is not the last weights but their exponential moving average, which on average reaches back
    this fraction of the steps. Training itself does not change."""
    save_every: Count = 50
    """Optimizer steps between checkpoints."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which needs less memory but is slower."""
    compile: bool = True
    """On a GPU, compile the layers, once for each row length. This takes about half a minute before the first step, and
    seconds if an earlier run has compiled the same layers. The forward and backward pass of a step are also captured as
    one CUDA graph."""
    copy_fraction: Fraction = 0.0
    """Fraction of the rows that repeat a span of text later in the row, so that remembering what has left the window
    pays off."""
    concat_documents: bool = False
    """Treat a row as one text even if it has several documents; otherwise each document starts afresh."""
    mixed_seq_lens: list[MixedSeqLen] = Field(default_factory=list)
    """Shorter rows mixed in with those of `seq_len`: a model trained only on long rows gets worse on short ones."""

    @property
    def sources(self) -> dict[str, float]:
        """The fraction of the tokens that is of each source, by name. In the order of the names: two recipes that
        differ in the order of a mapping are the same recipe."""
        return {self.data: 1.0} if isinstance(self.data, str) else dict(sorted(self.data.items()))

    def where(self, source: str) -> str:
        """The field of the stage that names `source`."""
        return "data" if isinstance(self.data, str) else f"data.{source}"

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.grad_accumulation * self.seq_len

    @property
    def steps(self) -> int:
        """Optimizer steps; the tokens that do not fill a last step are not trained on."""
        return self.tokens // self.step_tokens

    @property
    def responses_only(self) -> bool:
        """Whether the loss leaves out what is not a response."""
        return False

    @property
    def has_teacher(self) -> bool:
        """Whether the base runs in each micro-batch."""
        return False

    @property
    def uses_pissa(self) -> bool:
        """Whether its adapters start as a part of the base."""
        return self.lora is not None and self.lora.variant == "pissa"

    @model_validator(mode="after")
    def _consistent(self) -> Stage:
        trained = self.learning_rates.trained()
        if not trained:
            refuse(
                "learning_rates",
                f"every group is frozen, so give one of {', '.join(LearningRates.model_fields)} a learning rate",
            )
        if self.lora is None and "lora" in trained:
            refuse("learning_rates.lora", "this stage has no `lora:` section, so add one or drop the rate")
        if self.lora is not None:
            if "lora" not in trained:
                refuse("learning_rates.lora", "the `lora:` section needs a learning rate here")
            own = [name for name in ("attention", "body", "embeddings") if name in trained]
            if own:
                refuse(
                    f"learning_rates.{own[0]}",
                    "with `lora:` the base's own weights stay frozen, so drop one of the two",
                )
        if self.uses_pissa and self.weight_decay:
            refuse("weight_decay", DECAYS_BASE)
        for i, other in enumerate(self.mixed_seq_lens):
            if other.seq_len == self.seq_len or self.seq_len % other.seq_len:
                refuse(
                    f"mixed_seq_lens[{i}].seq_len",
                    f"{other.seq_len} is not a proper divisor of seq_len ({self.seq_len})",
                )
        if sum(other.fraction for other in self.mixed_seq_lens) >= 1:
            refuse("mixed_seq_lens", f"its fractions leave no row of seq_len ({self.seq_len}), so make them smaller")
        if self.steps < 1:
            size = f"batch_size × grad_accumulation × seq_len = {self.step_tokens}"
            refuse("tokens", f"{self.tokens} is less than one optimizer step ({size})")
        return self


class AlignStage(Stage):
    """Each layer learns to reproduce the base's attention output, given the base's own activations."""

    kind: Literal["align"] = "align"
    """`align`: each layer learns the base's attention output."""
    calibrate: bool = True
    """First fit each trained mixer in closed form on one batch, see
    [Calibration](concepts.md#calibration)."""
    layerwise: bool = False
    """Train the layers one after the other, with one layer of the base in memory at a time, so that any model fits one
    GPU. The hidden states of the stage's rows are stored on disk; they take twice `tokens` × the hidden size in values.
    The result is the same, see [Several GPUs](several-gpus.md#layer-by-layer)."""

    @property
    def has_teacher(self) -> bool:
        return True

    @property
    def fits_mixers(self) -> bool:
        """Whether the stage calibrates. A stage that does not train the mixers leaves them as they are."""
        return self.calibrate and self.learning_rates.mixer is not None

    @model_validator(mode="after")
    def _reachable(self) -> AlignStage:
        for name in ("body", "embeddings"):
            if name in self.learning_rates.trained():
                refuse(
                    f"learning_rates.{name}", "alignment gives it no gradient: each layer is fed the base's activations"
                )
        if self.layerwise and self.lora is not None and self.lora.targets != "attention":
            refuse("lora.targets", "layerwise holds only the attention of linearized layers, so set it to attention")
        return self


class DistillStage(Stage):
    """The model learns the base's next-token distribution, by KL divergence and optionally cross-entropy."""

    kind: Literal["distill"] = "distill"
    """`distill`: the model learns the base's next-token distribution."""
    kl_weight: Weight = 1.0
    """Weight of the KL divergence from the base's distribution."""
    ce_weight: Weight = 0.0
    """Weight of the cross-entropy on the text."""
    temperature: Temperature = 1.0
    """Temperature of both distributions in the KL divergence."""

    @property
    def has_teacher(self) -> bool:
        return self.kl_weight > 0

    @model_validator(mode="after")
    def _weighted(self) -> DistillStage:
        if self.kl_weight == 0 and self.ce_weight == 0:
            refuse("kl_weight", "kl_weight and ce_weight are both 0, so there is nothing to learn")
        return self


class FinetuneStage(Stage):
    """Cross-entropy on the data itself, either on the responses only or on every token."""

    kind: Literal["finetune"] = "finetune"
    """`finetune`: the model learns the data itself."""
    loss_on: Literal["responses", "all"] = "responses"
    """`responses` trains only on the assistant's tokens, `all` on every token."""

    @property
    def responses_only(self) -> bool:
        return self.loss_on == "responses"

    @model_validator(mode="after")
    def _tells_responses(self) -> FinetuneStage:
        if self.copy_fraction and self.responses_only:
            refuse("copy_fraction", "copied text does not mark its responses, so drop it or set loss_on to all")
        return self


AnyStage = Annotated[AlignStage | DistillStage | FinetuneStage, Field(discriminator="kind")]
