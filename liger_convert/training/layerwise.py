"""Layerwise alignment: trains the layers of a model of any size one after the other.

Only one layer of the base and the attention of one layer of the model are in memory at a time.

The layers of an alignment are independent, since each one is fed the base's own activations. So the rows of the stage
pass through the base one layer at a time. When they reach a linear layer, its attention is trained on the inputs and
outputs of the base's attention, with the same steps and rows as in whole-model alignment. The hidden states before the
next layer are written to disk (`hidden_states.py`). Those before the current layer are removed once it is done.

The resulting weights equal those of whole-model alignment, bit for bit on a CPU in float32, with two exceptions:

- Gradients are clipped per layer, to `max_grad_norm` / √(number of linear layers). The norm over all layers therefore
  never exceeds `max_grad_norm`, and an outlier in one layer does not shorten the steps of the others.
- Dropout, from `lora.dropout` or from the family itself, draws other random numbers.

Several processes, also on several hosts, share the rows of each step as in other stages. Each holds the layer that is
being trained. All of them read and write the same file of hidden states before a layer, each the rows of its own
batches. A row's place in it does not depend on the number of processes, which may change on resuming. A spare process
(`batch_split.sharing_groups`) writes nothing. What is done once is done by the first process. A barrier after each
layer makes sure that all rows are written before they are read, and read before they are removed.

Until the stage is done, its folder `layerwise` contains:

    state.json       how many layers are done, and their statistics
    fitted/          the calibrated mixers of each linear layer
    trained/         the trained parameters of each finished linear layer
    hidden-N, few-N  the hidden states before layer N: of all rows, and of the rows on which errors are reported
    checkpoints/     checkpoints of the layer that is being trained
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gc
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel, get_peft_model_state_dict
from rich.filesize import decimal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import set_seed

from liger_convert.config.stages import AlignStage
from liger_convert.data.mixed_rows import MixedDataset
from liger_convert.data.packed_rows import PackedDataset, collate
from liger_convert.io.checkpoint import ADAPTER_WEIGHTS, load_config
from liger_convert.io.files import atomic_dir, atomic_write, fsync
from liger_convert.io.run_folder import RunFolder
from liger_convert.model import MIXER_MODULE, AlignTargets, linear_layers
from liger_convert.model.loading import check_folder, read_finite
from liger_convert.model.shards import Entry, write_file
from liger_convert.training import pissa
from liger_convert.training.batch_split import batches_of, sharing_groups, steps_of
from liger_convert.training.calibrate import calibrating, in_two_lengths
from liger_convert.training.checkpoints import last_good, step_of
from liger_convert.training.disk_estimate import hidden_bytes
from liger_convert.training.hidden_states import HiddenStates, sums_of
from liger_convert.training.memory_estimate import CALIBRATION_TOKENS, ERROR_ROWS
from liger_convert.training.merge import ADAPTER, MODEL, Chain
from liger_convert.training.one_layer import (
    LayerObjective,
    LayerTrainer,
    OneLayer,
    attention_only,
    load_tensors,
    read_batch,
)
from liger_convert.training.student import compile_attention, compile_parts, gains_by_compiling, prepare
from liger_convert.utils import interrupts, processes
from liger_convert.utils.device import autocast
from liger_convert.utils.errors import BadInput, LinearizeError
from liger_convert.utils.progress import Report

FOLDER = "layerwise"
STATE = "state.json"


@dataclass
class _State:
    """The progress of a stage.

    of: identifies the stage and its rows; a resumed stage must match it. done: the number of finished layers. fitted:
    whether the mixers are calibrated. embedded: whether the embedded rows are on disk. before, after: the errors of the
    finished linear layers. losses: by step, summed over those layers. trained: the number of parameters trained so far.
    fwd_bwd: how their passes ran; if not all were captured, that of the first which was not. random: the random state
    after the last adapters were created, in base64.
    """

    of: dict[str, Any]
    done: int = 0
    fitted: bool = False
    embedded: bool = False
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    trained: int = 0
    seconds: float = 0.0
    fwd_bwd: str = ""
    random: str = ""


class LayerwiseStage:
    """One run of `stage` in the folder `out`. The arguments are those of `run_stage`; `dtype` is the compute dtype.

    All processes of a run make one and `run` it together. Then the first one calls `save` and `clear`.
    """

    def __init__(
        self,
        stage: AlignStage,
        *,
        model_dir: Path,
        results: Sequence[Path],
        base_dir: Path,
        dataset: PackedDataset | MixedDataset,
        out: Path,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        progress: Report | None,
    ):
        self.stage, self.dataset, self.device, self.dtype, self.seed = stage, dataset, device, dtype, seed
        self.folder, self.progress = RunFolder(out), progress
        self.work = self.folder.path(FOLDER)
        self.chain = Chain(model_dir, results)
        base_config, checkpoint = load_config(base_dir), check_folder(base_dir)
        read = functools.partial(read_finite, checkpoint)
        self.base = OneLayer(base_config, checkpoint.tensors, read, device, dtype)
        self.config, self.linear = self.chain.config, linear_layers(self.chain.config)
        self.steps = steps_of(stage, dataset)
        self.rows = self.steps * stage.batch_size * stage.grad_accumulation
        self.few = min(ERROR_ROWS, len(dataset))
        self.processes, self.is_first = processes.count(), processes.is_first()
        self.batches = batches_of(stage, self.steps, self.processes, processes.rank())
        self.is_spare = processes.rank() >= sharing_groups(stage, self.processes)
        shape = [self.rows, dataset.seq_len, base_config.hidden_size, str(dtype)]
        self.of = {"stage": stage.model_dump(mode="json"), "shape": shape, "seed": seed, "linear": self.linear}

    def run(self, resume: bool) -> dict[str, Any]:
        """Trains all layers and returns statistics. The trained tensors stay in the work folder until `clear`.

        resume: continue from an earlier run in the same folder, instead of removing it. Raises BadInput if the disk has
        too little space. Raises LinearizeError if training diverges, or if the earlier run is of another stage.
        """
        if self.processes > 1:
            PartialState(cpu=self.device.type == "cpu")  # makes this process's GPU the current one, for `HiddenStates`
        state = _State(**processes.from_first(lambda: asdict(self._begin(resume))))
        started = time.monotonic() - state.seconds

        def save() -> None:
            """Saves the state, which all processes have, once all have done what it says."""
            processes.barrier()
            state.seconds = time.monotonic() - started
            if self.is_first:
                atomic_write(self.work / STATE, json.dumps(asdict(state)))

        # without a learning rate, a LoRA stage does not save the mixers, so they must stay unchanged
        if self.stage.fits_mixers and not state.fitted:
            if self.is_first:
                self._calibrate()
            state.fitted = True
            save()
        if not state.embedded:
            self._embed()
            state.embedded = True
            save()
        for number in range(state.done, self.linear[-1] + 1):
            self._remove_states_before(number)
            with contextlib.ExitStack() as stack:
                self._layer(number, state, stack)
            gc.collect()  # a trainer has reference cycles, which would keep its layer's weights and moments alive
            state.done = number + 1
            save()
            if self.is_first:
                self.folder.remove(self.work / "checkpoints")
        self._remove_states_before(self.linear[-1] + 1)  # makes room for the result
        return {
            "seconds": round(state.seconds, 1),
            "trained_parameters": state.trained,
            "fwd_bwd": state.fwd_bwd,
            "losses": [(int(step), loss) for step, loss in state.losses.items()],
            "align_error": {"before": state.before, "after": state.after},
        }

    def save(self, result: Path) -> None:
        """Writes the stage's result to the new folder `result`: adapters or the whole model, one tensor at a time."""
        with atomic_dir(result) as new:
            if self.stage.lora is None:
                (new / MODEL).mkdir()
                self.chain.write(new / MODEL, {name: read for _, name, read in self._trained()})
                return
            (new / ADAPTER).mkdir()
            student = prepare(attention_only(self.config, self.linear[0]), self.stage)
            adapter = student.peft_config["default"]
            if self.stage.uses_pissa:
                pissa.double_rank(adapter)
            adapter.layers_to_transform, adapter.inference_mode = self.linear, True
            adapter.base_model_name_or_path = str(self.chain.checkpoint.folder)
            adapter.save_pretrained(new / ADAPTER)
            entries, reads = [], []
            for path, name, read in self._trained():
                with safe_open(path, "pt") as file:
                    entries.append(Entry(name, torch.float32, tuple(file.get_slice(name).get_shape())))
                reads.append(read)
            write_file(new / ADAPTER / ADAPTER_WEIGHTS, entries, (read() for read in reads))

    def clear(self) -> None:
        """Removes everything that this stage has written except its result."""
        self.folder.remove(self.work)

    # --- the parts of a run

    def _begin(self, resume: bool) -> _State:
        if not resume:
            self.clear()
        for name in ("fitted", "trained"):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        state = self._load_state()
        self._require_room(state)
        return state

    def _layer(self, number: int, state: _State, stack: contextlib.ExitStack) -> None:
        """Runs this process's rows through layer `number` of the base. Trains the model's layer of that number if it is
        linear."""
        is_last = number == self.linear[-1]
        before, few = self._states(number, stack), self._few_states(number, stack)
        after = None if is_last or self.is_spare else self._states(number + 1, stack)
        stack.enter_context(self.base.layer(number))
        if not is_last and self.is_first:
            following = self._few_states(number + 1, stack)
            following.write(0, self._few_targets(number, few)[1])
            following.flush()
        if number in self.linear:
            self._train(number, state, before, few, after)
        elif after is not None:
            self._run_softmax(number, before, after)

    def _few_targets(self, number: int, few: HiddenStates) -> tuple[AlignTargets, Tensor]:
        """What the layer is to give for the rows by which its error is measured, and the inputs of the next layer."""
        with autocast(self.device, self.dtype):
            return self.base.targets(few.read(0, self.few), self._few_positions(), number)

    def _few_positions(self) -> Tensor:
        return collate([self.dataset.whole(i) for i in range(self.few)])["position_ids"].to(self.device)

    def _run_softmax(self, number: int, before: HiddenStates, after: HiddenStates) -> None:
        """Writes what a layer that stays softmax makes of the rows."""
        with autocast(self.device, self.dtype):
            for at, batch in enumerate(self._batches()):
                x_BTC = read_batch(before, self.batches, at).view(*batch["input_ids"].shape, -1)
                after.write(self.batches[at].start, self.base.run(x_BTC, batch["position_ids"]))
                self._report(number, at * self.steps // len(self.batches), "softmax")
        after.flush()

    def _train(
        self, number: int, state: _State, before: HiddenStates, few: HiddenStates, after: HiddenStates | None
    ) -> None:
        """Trains a linear layer, and writes what the base's layer makes of the rows. Adds to `state`."""
        checkpoints = self.work / "checkpoints"
        last = processes.from_first(self._last_checkpoint)
        student = self._student(number, state)
        if self.stage.uses_pissa:
            pissa.start(student, checkpoints, resumes=last is not None)

        def error() -> float:
            with torch.no_grad(), autocast(self.device, self.dtype), torch.compiler.set_stance("force_eager"):
                targets = self._few_targets(number, few)[0]
                return float(student.eval()(align=targets, position_ids=self._few_positions()).loss)

        taken = 0 if last is None else step_of(checkpoints / last) * len(self.batches) // self.steps
        objective = LayerObjective(self.base, number, len(self.linear), before, after, self.batches, taken)
        if self.stage.compile and gains_by_compiling(self.device):
            compile_attention(student)
            compile_parts(self.base.backbone.layers[number])
        trainer = LayerTrainer(
            student,
            self.stage.model_copy(update={"max_grad_norm": self.stage.max_grad_norm / math.sqrt(len(self.linear))}),
            objective,
            self.dataset,
            out=checkpoints,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            progress=functools.partial(self._report_step, number),
            processes=self.processes,
            before_saving=objective.flush,
        )
        error_before = error()
        with interrupts.deferred():
            try:
                trainer.train(resume_from_checkpoint=None if last is None else str(checkpoints / last))
            finally:
                trainer.finish_checkpoint()
        objective.flush()
        trainer.fwd_bwd.forget()  # the next layer has graphs of its own
        if trainer.average is not None:
            trainer.average.apply()
        for entry in trainer.state.log_history:
            if "loss" in entry:
                step = str(entry["step"])
                state.losses[step] = state.losses.get(step, 0.0) + entry["loss"]
        state.before.append(error_before)
        state.after.append(error())
        state.trained += sum(p.numel() for p in student.parameters() if p.requires_grad)
        if state.fwd_bwd in ("", "captured"):
            state.fwd_bwd = "captured" if trainer.eager is None else f"eager: {trainer.eager}"
        if self.is_first:
            if self.stage.uses_pissa:
                pissa.become_changes(student, checkpoints)
            _write_tensors(self._layer_file("trained", number), _trained_tensors(student))

    def _last_checkpoint(self) -> str | None:
        """The name of the checkpoint from which the current layer's training continues, None if it begins."""
        checkpoints = self.work / "checkpoints"
        last = last_good(checkpoints)
        if last is not None and self.stage.uses_pissa and not pissa.is_kept(checkpoints):
            self.folder.remove(checkpoints)
            last = None
        return None if last is None else last.name

    def _student(self, number: int, state: _State) -> Any:
        """The attention of layer `number` with its initial weights and the stage's adapters.

        The adapters continue the random number stream of the adapters of earlier layers, as in a whole model.
        """
        student = attention_only(self.config, number)
        prefix = f"model.layers.{number}.self_attn."
        names = [name for name in self.chain.checkpoint.tensors if name.startswith(prefix)]
        fitted = self._read_fitted(number)
        tensors = {name: fitted[name] if name in fitted else self.chain.read(name) for name in names}
        load_tensors(student, tensors, torch.device("cpu"))
        set_seed(self.seed)
        if state.random:
            torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.random)), dtype=torch.uint8))
        student = prepare(student, self.stage)
        if self.stage.lora is not None:
            state.random = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        return student.to(self.device)

    def _embed(self) -> None:
        """Writes the inputs of the first layer, of this process's rows."""
        with contextlib.ExitStack() as stack:
            states = self._states(0, stack)
            stack.enter_context(self.base.embeddings())
            stack.enter_context(autocast(self.device, self.dtype))
            if self.is_first:
                few = self._few_states(0, stack)
                few.write(0, self.base.embed(collate([self.dataset.whole(i) for i in range(self.few)])["input_ids"]))
                few.flush()
            if self.is_spare:
                return
            for rows, batch in zip(self.batches, self._batches(), strict=True):
                states.write(rows.start, self.base.embed(batch["input_ids"]))
            states.flush()

    def _calibrate(self) -> None:
        """Fits the mixers layer by layer, each on the outputs of those fitted before it, as `calibrate` does.

        The fit uses few rows, so their hidden states stay in memory.
        """
        count = -(-CALIBRATION_TOKENS // self.stage.seq_len)
        batch = collate([self.dataset.whole(i) for i in range(min(count, len(self.dataset)))])
        batch = {name: x.to(self.device) for name, x in batch.items()}
        names = self.chain.checkpoint.tensors
        model = OneLayer(self.config, names, self.chain.read, self.device, torch.float32)
        positions_BT = in_two_lengths(batch["position_ids"], model.model)
        with autocast(self.device, self.dtype):
            with self.base.embeddings():
                base_x_BTC = self.base.embed(batch["input_ids"])
            with model.embeddings(), torch.autocast(self.device.type, enabled=False):
                x_BTC = model.embed(batch["input_ids"])
            for number in range(self.linear[-1] + 1):
                with self.base.layer(number):
                    targets, base_x_BTC = self.base.targets(base_x_BTC, positions_BT, number)
                with model.layer(number) as layer, torch.autocast(self.device.type, enabled=False):
                    if number not in self.linear:
                        x_BTC = model.run(x_BTC, positions_BT)
                        continue
                    with calibrating(model.model, targets, batch["input_ids"], positions_BT):
                        x_BTC = model.run(x_BTC, positions_BT)
                    prefix = f"model.layers.{number}.self_attn.{MIXER_MODULE}."
                    fitted = getattr(layer.self_attn, MIXER_MODULE).state_dict()
                    _write_tensors(self._layer_file("fitted", number), {prefix + name: x for name, x in fitted.items()})
                if self.progress is not None:
                    self.progress(0, None, f"calibrated layer {number}")

    # --- files

    def _load_state(self) -> _State:
        path = self.work / STATE
        if not path.exists():
            return _State(self.of)
        state = _State(**json.loads(path.read_text(encoding="utf-8")))
        if state.of != self.of:
            raise LinearizeError(f"{path}: belongs to another stage or to other rows; remove {self.work}")
        return state

    def _require_room(self, state: _State) -> None:
        """Raises BadInput if the disk has too little space for the hidden states that are yet to be written."""
        needed = hidden_bytes(self.rows + self.few, self.dataset.seq_len, self.config.hidden_size, self.dtype)
        written = sum(path.stat().st_size for path in self.work.glob("*-*") if path.is_file())
        free = shutil.disk_usage(self.work).free
        if needed - written > free:
            raise BadInput(
                f"{self.work}: the hidden states of this stage need {decimal(needed - written)} of disk, but "
                f"only {decimal(free)} are free; free some space, lower tokens, or name a folder on another disk"
            )

    def _states(self, number: int, stack: contextlib.ExitStack) -> HiddenStates:
        return stack.enter_context(self._open(f"hidden-{number}", self.rows))

    def _few_states(self, number: int, stack: contextlib.ExitStack) -> HiddenStates:
        return stack.enter_context(self._open(f"few-{number}", self.few))

    def _open(self, name: str, rows: int) -> HiddenStates:
        path, on_gpu = self.work / name, self.device.type == "cuda"
        return HiddenStates(path, rows, self.dataset.seq_len, self.config.hidden_size, self.dtype, on_gpu)

    def _remove_states_before(self, number: int) -> None:
        """Removes the hidden states of the layers before `number`, which no process has open any more."""
        if not self.is_first:
            return
        for kind in ("hidden", "few"):
            for path in self.work.glob(f"{kind}-*[0-9]"):
                if int(path.name.rpartition("-")[2]) < number:
                    self.folder.remove(path, sums_of(path))

    def _layer_file(self, kind: str, number: int) -> Path:
        return self.work / kind / f"{number:05}.safetensors"

    def _read_fitted(self, number: int) -> dict[str, Tensor]:
        path = self._layer_file("fitted", number)
        return load_file(path) if path.exists() else {}

    def _trained(self) -> Iterator[tuple[Path, str, Callable[[], Tensor]]]:
        """Yields the file, the name and a reading function for every trained tensor of every linear layer."""
        for number in self.linear:
            path = self._layer_file("trained", number)
            with safe_open(path, "pt") as file:
                names = list(file.keys())
            for name in names:
                yield path, name, functools.partial(_read_tensor, path, name)

    # --- rows and progress

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """Yields this process's micro-batches on the device."""
        for rows in self.batches:
            yield {name: x.to(self.device) for name, x in collate([self.dataset[i] for i in rows]).items()}

    def _report(self, number: int, step: float, note: str) -> None:
        if self.progress is not None:
            layers = self.linear[-1] + 1
            self.progress(number * self.steps + step, layers * self.steps, f"layer {number}, {note}")

    def _report_step(self, number: int, done: float, total: float | None, note: str = "") -> None:
        self._report(number, done, note)


def _trained_tensors(student: Any) -> dict[str, Tensor]:
    """The tensors of a layer that a stage saves, by their names in the result."""
    if isinstance(student, PeftModel):
        return get_peft_model_state_dict(student, save_embedding_layers=False)
    return {name: p for name, p in student.named_parameters() if p.requires_grad}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_suffix(".partial")
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, partial)
    fsync(partial)
    partial.replace(path)


def _read_tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
