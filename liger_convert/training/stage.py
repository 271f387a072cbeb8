"""Runs one training stage, from its initial model to a result folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.distributed import DeviceMesh
from transformers import set_seed

from liger_convert.config.stages import AlignStage, DistillStage, Stage
from liger_convert.data.documents import Document
from liger_convert.data.mixed_rows import MixedDataset, mix
from liger_convert.data.packed_rows import PackedDataset, collate, pack
from liger_convert.io.checkpoint import load_config
from liger_convert.io.files import atomic_dir, atomic_write
from liger_convert.io.run_folder import RunFolder
from liger_convert.model.loading import load_pretrained
from liger_convert.model.placing import place
from liger_convert.training import pissa
from liger_convert.training.adapters import adapted_model
from liger_convert.training.align import AlignObjective
from liger_convert.training.batch_split import split_batch
from liger_convert.training.checkpoints import last_good
from liger_convert.training.distill import DistillObjective
from liger_convert.training.finetune import FinetuneObjective
from liger_convert.training.frozen import is_narrowed
from liger_convert.training.full_result import help_to_write, write_model
from liger_convert.training.layerwise import FOLDER, LayerwiseStage
from liger_convert.training.memory_estimate import CALIBRATION_TOKENS, ERROR_ROWS
from liger_convert.training.merge import ADAPTER, MODEL, Chain, last_model, load_chain
from liger_convert.training.sequence_parallel import Group, check, group_of
from liger_convert.training.sharding import (
    gather_trained,
    give_up,
    mesh_of,
    mixers_of,
    shard_base,
    shard_student,
    shard_to_calibrate,
    without_weights,
)
from liger_convert.training.student import bytes_beside_teacher, compile_layers, curve, gains_by_compiling, prepare
from liger_convert.training.trainer import Objective, StageTrainer
from liger_convert.utils import interrupts, processes
from liger_convert.utils.device import autocast, compute_dtype
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report


def rows_of(stage: Stage, documents: Mapping[str, Sequence[Document]], seed: int) -> PackedDataset | MixedDataset:
    """The rows that a stage trains on, in order. documents: those of each source of the stage, by name.

    Raises BadInput if they do not fill one row.
    """
    options: dict[str, Any] = {
        "responses_only": stage.responses_only,
        "copy_fraction": stage.copy_fraction,
        "concat_documents": stage.concat_documents,
        "mixed_seq_lens": [(other.seq_len, other.fraction) for other in stage.mixed_seq_lens],
        "batch_size": stage.batch_size,
    }
    if isinstance(stage.data, str):
        return pack(documents[stage.data], stage.seq_len, stage.tokens, seed, **options)
    return mix(documents, stage.sources, stage.seq_len, stage.tokens, seed, **options)


def run_stage(
    stage: Stage,
    *,
    model_dir: Path,
    results: Sequence[Path],
    base_dir: Path,
    dataset: PackedDataset | MixedDataset,
    out: Path,
    device: torch.device,
    precision: str = "auto",
    seed: int = 0,
    resume: bool = False,
    shard: bool = False,
    keep_gathered: bool = False,
    sequence_parallel: int = 1,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Trains the linearized model `model_dir`, with the `results` of earlier stages merged in, on `dataset`.

    base_dir: the base, which is the teacher. out: the stage's folder. precision: see `compute_dtype`.

    Writes `out/result/adapter` (LoRA) or `out/result/model` (full); the result is complete or does not exist. Also
    writes `out/stats.json` and returns its contents. They are steps, tokens, seconds; the number of passes over the
    text (`epochs`; for a mix, that of the most-read source, and `sources` for each source); whether the weights were
    `sharded`; how the forward and backward pass ran (`fwd_bwd`); the loss curve as [step, mean loss since the previous
    point]; on a GPU the most memory in bytes that was reserved during training, captured graphs included
    (`gpu_memory`, of the first process); and for alignment the relative error of each layer on the first ERROR_ROWS
    rows, before and after.

    With an `ema_length`, the result is the average of the weights, and the errors after training are those of the
    average. With `resume`, training continues from the last checkpoint in `out`, and ends with the same weights as if
    it had never been stopped.

    Under `torchrun`, every process calls it, and the first one writes. The processes split the rows of each step, see
    `split_batch`. A step therefore has the same rows at any number of processes, which may change on resuming. With
    `shard` they also share the weights, see `sharding.py`, which `keep_gathered` is for; the result has the same files.
    `sequence_parallel` processes share each row, see `sequence_parallel.py` and its `check`.

    Raises BadInput if `out` already has a result (without `resume`), and for settings that cannot be combined. Raises
    LinearizeError if training diverges.
    """
    folder = RunFolder(out)
    result, checkpoints, stats_file = (folder.path(name) for name in ("result", "checkpoints", "stats.json"))
    if result.exists() and resume:
        if processes.is_first():
            folder.remove(folder.path(FOLDER))  # left by a process killed right after it wrote the result
        return json.loads(stats_file.read_text())
    if result.exists():
        raise BadInput(f"{result}: already exists; name a new folder or remove this one")
    if device.type == "cuda" and device.index:
        raise BadInput(
            f"device: training uses the first GPU it sees; use cuda with CUDA_VISIBLE_DEVICES={device.index}"
        )
    count = processes.count()
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:  # under torchrun each process has its own GPU
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

    dtype = compute_dtype(device, precision)
    options: dict[str, Any] = {"dataset": dataset, "device": device, "dtype": dtype, "seed": seed, "progress": progress}
    if isinstance(stage, AlignStage) and stage.layerwise:
        split_batch(stage, count, sequence_parallel)  # raises before anything is written
        layers = LayerwiseStage(stage, model_dir=model_dir, results=results, base_dir=base_dir, out=out, **options)
        check(stage, layers.config, sequence_parallel)
        facts = layers.run(resume)
        losses = facts.pop("losses")
        stats = _facts(stage, dataset, len(losses)) | {"sharded": False, **facts, "loss": curve(losses)}
        if processes.is_first():
            atomic_write(stats_file, json.dumps(stats, indent=1))
            layers.save(result)
            layers.clear()
        processes.barrier()  # so that every process can read the result right away
        return stats

    set_seed(seed)
    mesh = mesh_of(device) if shard and count > 1 else None
    split_batch(stage, count, sequence_parallel)  # raises before anything is loaded
    # A full result takes its frozen weights from here. Opened now, so that an unsupported adapter fails before
    # training.
    fewer_digits = mesh is not None or is_narrowed(stage, dtype)
    start = Chain(model_dir, results) if fewer_digits and stage.lora is None and processes.is_first() else None
    model = load_start(model_dir, results, mesh)
    check(stage, model.config, sequence_parallel)
    sequence = group_of(device, sequence_parallel) if sequence_parallel > 1 else None
    taken = bytes_beside_teacher(stage, model, device, dtype, count, sequence_parallel)
    objective = make_objective(stage, model.config, base_dir, device, dtype, mesh, taken, keep_gathered)
    setup = _Setup(stage, dataset, device, dtype, mesh, sequence)
    # without a learning rate, a LoRA stage does not save the mixers, so they must stay unchanged
    if isinstance(stage, AlignStage) and stage.fits_mixers:
        fitted = setup.fit_mixers(model, objective)
        if mesh is not None:  # adapters must be added before sharding
            del model  # else both models would be in memory at once
            model = load_start(model_dir, results, mesh)
            if processes.is_first():
                model.load_state_dict(fitted, strict=False)
    if not resume and processes.is_first():
        folder.remove(checkpoints)  # left by an earlier attempt
    last = last_good(checkpoints) if resume and processes.is_first() else None
    model = prepare(model, stage)
    if stage.uses_pissa:
        if last is not None and not pissa.is_kept(checkpoints):
            folder.remove(checkpoints)
            last = None
        pissa.start(model, checkpoints, resumes=last is not None)
    setup.spread(model, objective, keep_gathered)
    shared: dict[str, Any] = {"processes": count, "sharded": mesh is not None, "sequence": sequence}
    trainer = StageTrainer(model, stage, objective, out=checkpoints, **options, **shared)
    aligning = isinstance(stage, AlignStage)
    before = setup.layer_errors(model, objective) if aligning else []
    seconds = _train(trainer, last, device)
    stats = setup.statistics(trainer, model, seconds)
    if aligning:
        stats["align_error"] = {"before": before, "after": setup.layer_errors(model, objective)}
    if mesh is not None and stage.lora is not None:
        # an adapter is saved without the model's other weights, so a model on the meta device suffices
        trained, model = model, prepare(without_weights(model.config), stage)
        gather_trained(trained, model)
    if trainer.is_world_process_zero():
        atomic_write(stats_file, json.dumps(stats, indent=1))
        _write_result(stage, model, result, start, checkpoints)
        folder.remove(checkpoints)
    elif mesh is not None and stage.lora is None:
        help_to_write(model)
    processes.barrier()  # so that every process can read the result right away
    return stats


@dataclass(frozen=True)
class _Setup:
    """What a stage trains on: its rows, the device, and how the processes share the weights (`mesh`) and each row
    (`sequence`)."""

    stage: Stage
    dataset: PackedDataset | MixedDataset
    device: torch.device
    dtype: torch.dtype
    mesh: DeviceMesh | None
    sequence: Group | None

    def first_rows(self, count: int) -> dict[str, torch.Tensor]:
        batch = collate([self.dataset.whole(i) for i in range(min(count, len(self.dataset)))])
        return {name: t.to(self.device) for name, t in batch.items()}

    def fit_mixers(self, model: Any, objective: Objective) -> dict[str, torch.Tensor]:
        """Calibrates the mixers in place. If that takes sharding the model, returns them, of the first process."""
        assert isinstance(objective, AlignObjective)
        model = model.to(self.device) if self.mesh is None else shard_to_calibrate(model, self.mesh)
        with autocast(self.device, self.dtype):
            rows = self.first_rows(-(-CALIBRATION_TOKENS // self.stage.seq_len))
            if self.sequence is not None:  # each process fits all mixers, on no more tokens than fit in its memory
                most = max(CALIBRATION_TOKENS, self.stage.seq_len // self.sequence.size)
                rows = {name: x[:, :most] for name, x in rows.items()}
            objective.calibrate(model, rows)
        return {} if self.mesh is None else mixers_of(model)

    def spread(self, model: Any, objective: Objective, keep_gathered: bool) -> None:
        """Divides rows and weights among the processes, or compiles the layers where that is worth it."""
        aligns = isinstance(self.stage, AlignStage)
        if self.sequence is not None:
            for body in (model, getattr(objective, "base", None)):
                if body is not None:
                    self.sequence.install(adapted_model(body))
        if self.mesh is not None:
            shard_student(model, self.mesh, self.dtype, aligns=aligns, keep_gathered=keep_gathered)
        if self.stage.compile and self.sequence is None and gains_by_compiling(self.device):
            compile_layers(model, objective, aligns)

    def layer_errors(self, model: Any, objective: Objective) -> list[float]:
        """The relative error of each linearized layer on the first ERROR_ROWS rows."""
        assert isinstance(objective, AlignObjective)
        rows = self.first_rows(ERROR_ROWS)
        # eager, since two batches are not worth another compilation
        with autocast(self.device, self.dtype), torch.compiler.set_stance("force_eager"):
            errors = objective.layer_errors(model.eval(), rows if self.sequence is None else self.sequence.cut(rows))
        give_up(model)
        if self.sequence is None:
            return errors
        return self.sequence.total(torch.tensor(errors, device=self.device)).tolist()

    def statistics(self, trainer: StageTrainer, model: Any, seconds: float) -> dict[str, Any]:
        """What `run_stage` returns, but for the errors of an alignment."""
        losses = [(int(entry["step"]), entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        stats = _facts(self.stage, self.dataset, trainer.state.global_step) | {
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "seconds": round(seconds, 1),
            "sharded": self.mesh is not None,
            "fwd_bwd": "captured" if trainer.eager is None else f"eager: {trainer.eager}",
            "loss": curve(losses),
        }
        if self.device.type == "cuda":
            stats["gpu_memory"] = torch.cuda.max_memory_reserved(self.device)
        return stats


def _train(trainer: StageTrainer, last: Path | None, device: torch.device) -> float:
    """Trains, from the first process's checkpoint `last` if there is one. Returns the seconds that this and earlier
    attempts took."""
    processes.barrier()  # some processes may read the data for longer than the timeout of a collective
    last = _agreed(last)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with interrupts.deferred():
        try:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        finally:
            trainer.finish_checkpoint()
    seconds = trainer.watch.seconds()
    if trainer.average is not None:
        trainer.average.apply()
    return seconds


def _write_result(stage: Stage, model: Any, result: Path, start: Chain | None, checkpoints: Path) -> None:
    """Writes the adapter or the model to the new folder `result`. start: where a model's frozen weights come from."""
    with atomic_dir(result) as new:
        if stage.lora is None:
            write_model(model, new / MODEL, start)
        else:
            if stage.uses_pissa:
                pissa.become_changes(model, checkpoints)
            model.config.use_cache = True  # Trainer switches it off
            model.save_pretrained(new / ADAPTER, save_embedding_layers=False)


def _facts(stage: Stage, dataset: PackedDataset | MixedDataset, steps: int) -> dict[str, Any]:
    """The statistics that all stages have, for a stage of `steps` steps on `dataset`."""
    return {
        "kind": stage.kind,
        "steps": steps,
        "tokens": steps * stage.step_tokens,
        "epochs": round(dataset.epochs, 3),
        **({"sources": _read(dataset)} if isinstance(dataset, MixedDataset) else {}),
    }


def _read(dataset: MixedDataset) -> dict[str, dict[str, float]]:
    """How much of each source was read, by name."""
    return {
        name: {"fraction": round(share.fraction, 6), "epochs": round(share.epochs, 3)}
        for name, share in dataset.sources.items()
    }


def _agreed(checkpoint: Path | None) -> Path | None:
    """The first process's checkpoint, in all processes."""
    if processes.count() == 1:
        return checkpoint
    (agreed,) = broadcast_object_list([checkpoint])
    return agreed


def load_start(model_dir: Path, results: Sequence[Path], mesh: DeviceMesh | None) -> Any:
    """The model that a stage starts from, see `load_chain`. If it will be sharded, only the first process loads the
    weights; the others get a model on the meta device."""
    if mesh is None or processes.is_first():
        return load_chain(model_dir, results)
    return without_weights(load_config(last_model(model_dir, results)[0]))


def make_objective(
    stage: Stage,
    config: Any,
    base_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    taken: int,
    keep_gathered: bool = False,
) -> Objective:
    """The stage's objective, with its teacher if it needs one.

    config: of the linearized model. mesh: the teacher is sharded over it; keep_gathered: see `shard_base`. Without a
    mesh, the teacher's last layers stay in host memory if they do not fit on the GPU along with the `taken` bytes of
    training.
    """

    def teacher() -> Any:
        if mesh is None:
            base = load_pretrained(base_dir, dtype=dtype).requires_grad_(False)
            return place(base, device, share=1.0, taken=taken)  # no safety margin: `taken` is an estimate, not a guess
        first = processes.is_first()
        base = load_pretrained(base_dir, dtype=dtype) if first else without_weights(load_config(base_dir))
        aligns = isinstance(stage, AlignStage)
        return shard_base(base.requires_grad_(False).eval(), mesh, aligns=aligns, keep_gathered=keep_gathered)

    if isinstance(stage, AlignStage):
        return AlignObjective(teacher(), config)
    if isinstance(stage, DistillStage):
        return DistillObjective(teacher() if stage.has_teacher else None, stage)
    return FinetuneObjective()
