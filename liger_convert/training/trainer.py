"""`transformers.Trainer` for a stage: its loss, parameter groups, and checkpoints of the trained parameters only."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from liger_convert.config.stages import Stage
from liger_convert.data.mixed_rows import MixedDataset
from liger_convert.data.packed_rows import IGNORED, PackedDataset, collate
from liger_convert.mixers.base import Mixer
from liger_convert.model import parameter_group, take_auxiliary_loss
from liger_convert.model.shards import Entry, write_file
from liger_convert.training import checkpoints, sharded_checkpoint
from liger_convert.training.batch_split import sharing_groups, split_batch, steps_of, whole_groups
from liger_convert.training.capture import CapturedFwdBwd, why_not_captured
from liger_convert.training.frozen import narrow_frozen, run_wide_experts_apart
from liger_convert.training.gradient_averaging import are_alike, average_flats, average_gradients, begin_alike
from liger_convert.training.sequence_parallel import Group
from liger_convert.training.sharding import copy_whole
from liger_convert.training.weight_average import WeightAverage
from liger_convert.utils import interrupts
from liger_convert.utils.device import autocast
from liger_convert.utils.errors import LinearizeError
from liger_convert.utils.processes import barrier
from liger_convert.utils.progress import Report

logger = logging.get_logger(__name__)

TRAINED_FILE, AVERAGE_FILE = "trained.safetensors", "average.safetensors"
# Devices on which Trainer's own loading of optimizer states is fine. For a GPU it would load them into host memory
# first.
READ_WHOLE = {"cpu"}
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


class Objective(Protocol):
    """The loss of one batch, as a differentiable scalar.

    summed: whether it is a sum over the labeled tokens; otherwise it is a mean over the batch. Without `position_ids`,
    every row is one document.
    """

    summed: bool

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor: ...


def freeze(model: nn.Module, rates: dict[str, float]) -> None:
    """Freezes all parameters except those of groups with a learning rate. rates: learning rates by group."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_group(name, model.config) in rates)


def optimizer_groups(model: nn.Module, rates: dict[str, float], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters as optimizer groups, by learning rate and weight decay. rates: learning rates by group.

    Only matrices decay. Biases, norms and mixer parameters do not: zero is not a neutral value for a mixer's gates and
    feature maps. A mixer's `slow_parameters` get a fraction of its learning rate.
    """
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    slow = {name: part for mixer in mixers for name, part in mixer.slow_parameters.items()}
    groups: dict[tuple[str, bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = "lora" if ".lora_" in name else parameter_group(name, model.config)
            part = slow.get(name.rpartition(".")[2], 1.0) if group == "mixer" else 1.0
            groups.setdefault((group, parameter.dim() >= 2 and group != "mixer", part), []).append(parameter)
    return [
        {"params": parameters, "lr": rates[group] * part, "weight_decay": weight_decay * decays}
        for (group, decays, part), parameters in groups.items()
    ]


def _arguments(
    stage: Stage, out: Path, device: torch.device, seed: int, steps: int, batch_size: int, grad_accumulation: int
) -> TrainingArguments:
    """Trainer's arguments for a stage of `steps` optimizer steps. batch_size, grad_accumulation: of this process."""
    checkpointing: dict[str, Any] = {}
    if stage.gradient_checkpointing:
        checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    args = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=grad_accumulation,
        learning_rate=max(stage.learning_rates.trained().values()),
        lr_scheduler_type=SCHEDULES[stage.schedule],
        warmup_steps=round(stage.warmup_ratio * steps),
        max_grad_norm=stage.max_grad_norm,
        **checkpointing,
        save_strategy="steps" if stage.save_every < steps else "no",
        save_steps=stage.save_every,
        logging_steps=1,
        logging_nan_inf_filter=False,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=device.type == "cuda",
        use_cpu=device.type == "cpu",
        ddp_find_unused_parameters=True,  # alignment does not run all parameters, nor does a batch use all experts
        seed=seed,
        report_to=[],
        disable_tqdm=True,
    )
    args._n_gpu = min(args.n_gpu, 1)  # else DataParallel would split batches over the GPUs; that is torchrun's job
    return args


class StageTrainer(Trainer):
    """Trains `model` in place. Raises LinearizeError as soon as the loss or the gradient norm is not finite.

    An optimizer step has the same rows, and the same loss, for any number of `processes`. A checkpoint can be resumed
    with or without sharding, whichever way it was written.

    out: the folder of checkpoints. dtype: the compute dtype. sharded: whether the weights are sharded and in place
    already, see `sharding.py`. If not, `model` is moved to `device`, its frozen weights are cast as in `frozen.py`, and
    it is replicated by DDP, or by `gradient_averaging.py` if passes are captured. sequence: the group with which this
    process shares each row. before_saving: called before each checkpoint is written.
    """

    _finishing: Future[None] | None

    def __init__(
        self,
        model: nn.Module,
        stage: Stage,
        objective: Objective,
        dataset: PackedDataset | MixedDataset,
        *,
        out: Path,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        progress: Report | None = None,
        processes: int = 1,
        sharded: bool = False,
        sequence: Group | None = None,
        before_saving: Callable[[], None] | None = None,
    ):
        self.sequence, self.shards = sequence, 1 if sequence is None else sequence.size
        batch_size, grad_accumulation = split_batch(stage, processes, self.shards)
        groups = whole_groups(processes, self.shards)
        self.sharing = sharing_groups(stage, groups)
        steps = steps_of(stage, dataset)
        rates = stage.learning_rates.trained()
        args = _arguments(stage, out, device, seed, steps, batch_size, grad_accumulation)
        self.group = args.process_index // self.shards
        # scales the loss, since gradients are averaged over all groups, and those of spare groups must not count
        self.weight = groups / self.sharing if self.group < self.sharing else 0.0
        self.sharded, self.before_saving = sharded, before_saving
        if sharded:
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # keeps accelerate from wrapping it in DDP
        else:
            narrow_frozen(model, stage, dtype)
            run_wide_experts_apart(model, dtype)
            model.to(args.device)
        optimizer = torch.optim.AdamW(optimizer_groups(model, rates, stage.weight_decay), fused=True)
        self.watch = _Watch(stage.step_tokens, progress, device, processes)
        self.average = WeightAverage(_trained(model), stage.ema_length * steps) if stage.ema_length else None
        super().__init__(
            model=model,
            args=args,
            data_collator=collate if self.weight else _collate_without_labels,
            train_dataset=dataset,
            optimizers=(optimizer, None),
            callbacks=[self.watch] if self.average is None else [self.watch, self.average],
        )
        self.remove_callback(PrinterCallback)
        self.objective: Objective = objective
        self.models = [m for m in (model, getattr(objective, "base", None)) if m is not None]
        exchanges = sharded or sequence is not None
        # why the passes are not captured as a CUDA graph; None if they are
        self.eager = why_not_captured(stage, self.models, device, exchanges)
        # over how many processes this class averages gradients itself; 0 if it does not
        self.averages = processes if self.eager is None and processes > 1 else 0
        if self.averages:
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # as above
            begin_alike(model)
        self.flat = False  # whether this step's gradients are averaged through the flat tensors of the graphs
        trained = list(self._trained().values())
        most = dataset.most_documents() if self.eager is None and not stage.concat_documents else None
        self.fwd_bwd = CapturedFwdBwd(
            self._eager_fwd_bwd, trained, self.models, bool(self.averages), self._outputs, most
        )
        self.dtype = dtype
        self._finisher, self._finishing = ThreadPoolExecutor(1), None
        self.model_accepts_loss_kwargs = True  # makes Trainer count the labeled tokens of a step
        self.loss_is_scaled_for_ga = True  # by compute_loss; transformers before 5.20 uses the line above instead

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's own, with the seconds of training so far, which a checkpoint keeps with the losses."""
        super().log(logs | {"seconds": self.watch.seconds()}, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own. The processes also agree here on how to average this step's gradients, while the GPU is
        idle."""
        batches, counted = super().get_batch_samples(*args, **kwargs)
        if self.averages:
            replays = self.eager is None and all(self.fwd_bwd.knows(self._given(x, counted)) for x in batches)
            self.flat = are_alike(self.fwd_bwd.layout if replays else 0, self.args.device)
        return batches, counted

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Forward and backward pass of a micro-batch, as one CUDA graph if possible. Returns the detached loss."""
        loss = self._pass(model, inputs, num_items_in_batch)
        if self.averages and self.accelerator.sync_gradients:
            self._average()
        return loss

    def _average(self) -> None:
        if self.flat:
            average_flats(self.fwd_bwd.flats, self.averages)
        else:
            average_gradients(self.fwd_bwd.parameters, self.averages)

    def _given(self, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None) -> dict[str, Tensor]:
        """The tensors of a micro-batch that a graph takes as inputs."""
        unused = "position_ids" if self.fwd_bwd.most_documents is None else None
        batch = {name: x for name, x in self._prepare_inputs(inputs).items() if name != unused}
        return batch | {"counted": torch.as_tensor(num_items_in_batch, device=self.args.device)}

    def _pass(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None) -> Tensor:
        if self.eager is None:
            batch = self._given(inputs, num_items_in_batch)
            if not self.fwd_bwd.knows(batch):
                self._before_capture()
            try:
                self.fwd_bwd.capture(batch)
            except RuntimeError as error:
                self.eager = f"the capture failed: {str(error).splitlines()[0]}"
                self.fwd_bwd.forget()
                logger.warning_once(
                    f"training is slower than it could be because its step is not captured: {self.eager}"
                )
            else:
                return self.fwd_bwd(batch)
        return super().training_step(model, inputs, num_items_in_batch)

    def get_train_dataloader(self) -> Any:
        """Trainer's own, but the processes of a group get the same rows, and a spare group those of another one."""
        loader = super().get_train_dataloader()
        if self.sharing != self.args.world_size:
            sampler: Any = loader.batch_sampler  # accelerate's, which distributes batches among processes
            sampler.num_processes, sampler.process_index = self.sharing, self.group % self.sharing
        return loader

    def _eager_fwd_bwd(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None
        return super().training_step(self.model, batch, batch["counted"])

    def _outputs(self) -> tuple[Tensor, ...]:
        """What the last pass has left on the device besides its loss: see `CapturedFwdBwd`."""
        return ()

    def _before_capture(self) -> None:
        """Called before a pass is captured. No other thread may use the GPU meanwhile."""

    def compute_loss_context_manager(self) -> Any:
        """Our own autocast, because accelerate's converts all logits to float32."""
        stack = contextlib.ExitStack()
        stack.enter_context(autocast(self.args.device, self.dtype))
        return stack

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of this process's part of a micro-batch, scaled so that gradients add up over micro-batches and
        average over processes to those of the whole step."""
        if self.sequence is not None:
            inputs = self.sequence.cut(inputs)
        # the losses of shards should add up, but DDP averages over processes
        loss = self.objective(model, inputs) * self.shards
        auxiliary = take_auxiliary_loss(model) * self.weight / self.current_gradient_accumulation_steps
        if self.objective.summed:
            # a mean over the tokens of all micro-batches and processes; times the processes, as DDP averages over them.
            # A spare group counts no tokens and adds nothing.
            loss = loss * self.accelerator.num_processes / torch.as_tensor(num_items_in_batch).clamp_min(1)
        else:
            loss = loss * self.weight / self.current_gradient_accumulation_steps
        return loss + auxiliary

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's own, into a temporary folder next to the finished checkpoints. Hashing it and moving it into place
        happens in the background, while training continues."""
        self.finish_checkpoint()
        if self.before_saving is not None:
            self.before_saving()
        folder = Path(str(self.args.output_dir))
        if self.is_world_process_zero():
            checkpoints.clear_unfinished(folder)
        barrier()  # the disk may take longer than the timeout of a collective
        self.args.output_dir = str(folder / checkpoints.UNFINISHED)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(folder)
        barrier()
        if self.is_world_process_zero():
            self._finishing = self._finisher.submit(checkpoints.finish, folder)

    def finish_checkpoint(self) -> None:
        """Waits until the last checkpoint is in its final place. Raises any error of the background thread."""
        if self._finishing is not None:
            finishing, self._finishing = self._finishing, None
            finishing.result()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the trained parameters, under their own names, and their average. The rest can be read from the stage's
        initial model. transformers would save a mixture of experts under names that Trainer cannot load."""
        if self.args.should_save and not self.sharded:
            assert output_dir is not None
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            files: dict[str, Mapping[str, Tensor]] = {TRAINED_FILE: self._trained()}
            if self.average is not None:
                files[AVERAGE_FILE] = self.average.averages
            for name, tensors in files.items():  # one tensor at a time: they may not fit in host memory together
                write_file(Path(output_dir) / name, Entry.of(tensors), tensors.values())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        averages = None if self.average is None else self.average.averages
        sharded_checkpoint.save(Path(output_dir), self._trained(), self.optimizer, averages)
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder, trained = Path(resume_from_checkpoint), self._trained()
        averages = None if self.average is None else self.average.averages
        if sharded_checkpoint.is_sharded(folder):
            stored = sharded_checkpoint.names(folder)
            names = {name.removeprefix("weights.") for name in stored if name.startswith("weights.")}
            has_average = any(name.startswith("average.") for name in stored)
        else:
            with safe_open(folder / TRAINED_FILE, "pt") as file:
                names = set(file.keys())
            has_average = (folder / AVERAGE_FILE).exists()
        if names != trained.keys():
            raise LinearizeError(
                f"{resume_from_checkpoint}: belongs to a stage that trained other parameters; remove it"
            )
        if averages is not None and not has_average:
            raise LinearizeError(f"{resume_from_checkpoint}: belongs to a stage without ema_length; remove it")
        if sharded_checkpoint.is_sharded(folder):
            sharded_checkpoint.load_weights(folder, trained, averages)
            return
        with safe_open(folder / TRAINED_FILE, "pt") as file:
            for name, parameter in trained.items():
                copy_whole(parameter.data, file.get_tensor(name))
        if self.average is not None:
            with safe_open(folder / AVERAGE_FILE, "pt") as file:
                self.average.load(file.get_tensor)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        is_whole = checkpoint is None or not (self.sharded or sharded_checkpoint.is_sharded(Path(checkpoint)))
        if checkpoint is None or (is_whole and self.args.device.type in READ_WHOLE):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        folder = Path(checkpoint)
        if sharded_checkpoint.is_sharded(folder):
            sharded_checkpoint.load_optimizer(folder, self._trained(), self.optimizer)
        else:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            sharded_checkpoint.load_whole_optimizer(folder / OPTIMIZER_NAME, parameters, self.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _trained(self) -> dict[str, nn.Parameter]:
        assert self.model is not None
        return _trained(self.model)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _collate_without_labels(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """`collate`, for rows none of whose tokens count."""
    batch = collate(items)
    return batch | {"labels": torch.full_like(batch["labels"], IGNORED)}


class _Watch(TrainerCallback):
    """Reports progress, saves a checkpoint when a signal stops training, and stops training if it diverges, before the
    diverged weights are saved."""

    def __init__(self, step_tokens: int, progress: Report | None, device: torch.device, processes: int):
        self.step_tokens, self.progress = step_tokens, progress
        self.device, self.processes = device, processes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first = time.monotonic(), state.global_step
        self.before = state.log_history[-1].get("seconds", 0.0) if state.log_history else 0.0
        if self.processes > 1 or state.global_step:
            # Each process needs its own dropout. On resuming with as many processes, the checkpoint's random state
            # replaces this seed.
            drawn = np.random.SeedSequence((args.seed, args.process_index, state.global_step))
            set_seed(int(drawn.generate_state(1)[0]))

    def seconds(self) -> float:
        """How long the stage has trained, the time before it was resumed included."""
        return self.before + time.monotonic() - self.started

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_stopping():
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopping if self.processes > 1 else self._is_stopping():
            raise interrupts.Stopped

    def _is_stopping(self) -> bool:
        """Whether a signal asked any of the processes to stop: all must save the same step."""
        self.stopping = interrupts.received() is not None
        if self.processes > 1:
            asked = torch.full((), int(self.stopping), device=self.device)  # no copy from the host
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
            self.stopping = bool(asked)
        return self.stopping

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        for name, value in (("loss", logs["loss"]), ("gradient norm", logs.get("grad_norm", 0.0))):
            if not math.isfinite(value):
                raise LinearizeError(
                    f"training diverged: the {name} is {value} at step {state.global_step} of {state.max_steps}; "
                    "lower learning_rates or max_grad_norm, or raise warmup_ratio"
                )
        if self.progress is not None:
            speed = (state.global_step - self.first) * self.step_tokens / (time.monotonic() - self.started)
            self.progress(state.global_step, state.max_steps, f"loss {logs['loss']:.4f}, {speed:,.0f} tokens/s")
