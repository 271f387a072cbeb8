"""Runs tiny models over rows that processes share; started by torchrun.

    torchrun --nproc-per-node 2 tests/support/shards.py CASES.json

A case has a `mixer` (its options), and may have `layers`, a `family` and its `changes`. Each process runs the model
over whole rows by itself, then over its shard. What the first one prints is of all processes: by how much the shards'
logits, loss and gradients differ from those of whole rows, how much rounding alone does, and a shard's logits without
its neighbors. Each is a fraction of the largest value.

A case with `bfloat16` runs in it, see `compare_in_bfloat16`; of one with `fused`, see `given_to_fused_attention`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import tiny_config
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from transformers import AutoModelForCausalLM

from liger_convert.mixers import resolve_spec
from liger_convert.model import collect_align_targets, linear_layers, linearized_classes, linearized_config
from liger_convert.training.sequence_parallel import Group, group_of
from liger_convert.utils.device import autocast

SHARD = 24  # tokens
CPU = torch.device("cpu")
# documents of two rows: one that begins just before the second shard, one that begins with it, and a row that is one
LENGTHS = {
    2: [[9, 13, 26], [24, 3, 21], [48]],
    3: [[9, 13, 50], [24, 3, 45], [72]],
    4: [[9, 13, 74], [24, 3, 45, 2, 22], [96]],
}
HALF_A_UNIT = 2.0**-25  # of the last place of a float32


def rows(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS[count]])
    ids = torch.randint(3, 101, position_ids.shape, generator=generator)
    labels = torch.where(position_ids == 0, -100, ids)
    return {"input_ids": ids, "position_ids": position_ids, "labels": labels}


def make_model(case: dict[str, Any], generator: torch.Generator) -> Any:
    """A model whose memories matter: new parameters are moved from where they start."""
    base = tiny_config(case.get("family", "llama"), **case.get("changes", {}))
    spec = resolve_spec({"window": 8, "sinks": 3} | case["mixer"], "mixer")
    layers = case.get("layers", ["main", "softmax", "main"])
    config = linearized_config(base, {"format": 2, "mixers": {"main": spec}, "layers": layers})
    torch.manual_seed(0)
    model = linearized_classes(base.model_type)[2](config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".mixer." in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
            if name.endswith(("log_share_H", "mix_H")):
                p.add_(4)
            if name.endswith("gate_bias_GF"):
                p.sub_(3)  # a memory that forgets within the row
    return model


def run(model: Any, batch: dict[str, Any], count: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients."""
    model.zero_grad()
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    next_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)[:, : logits.shape[1]]
    loss = F.cross_entropy(logits.flatten(0, 1), next_BT.flatten(), ignore_index=-100, reduction="sum") / count
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), grads


def away(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    largest = max(float(x.abs().max()) for x in theirs.values())
    return max(
        float((ours[name] - x).abs().max()) / max(float(x.abs().max()), 1e-4 * largest) for name, x in theirs.items()
    )


def compare(case: dict[str, Any], group: Group) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    model, batch = make_model(case, generator), rows(group.size, generator)
    count = (batch["labels"][:, 1:] != -100).sum()
    whole = run(model, batch, count)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 2 * HALF_A_UNIT * torch.randn(p.shape, generator=generator).sign())
    moved = run(model, batch, count)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    own = slice(group.rank * SHARD, (group.rank + 1) * SHARD)
    alone = run(model, {name: x[:, own] for name, x in batch.items()}, count)
    group.install(model)
    logits, loss, grads = run(model, group.cut(batch), count)
    grads = {name: group.total(x) for name, x in grads.items()}
    found = torch.tensor([away(logits, whole[0][:, own]), away(alone[0], whole[0][:, own])], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    assert grads.keys() == whole[2].keys()
    return {
        "logits": float(found[0]),
        "alone": float(found[1]),
        "loss": away(group.total(loss), whole[1]),
        "gradients": worst(grads, whole[2]),
        "rounding_of_logits": away(moved[0], whole[0]),
        "rounding_of_gradients": worst(moved[2], whole[2]),
        "size_of_mixers": max([float(x.abs().max()) for name, x in whole[2].items() if ".mixer." in name] or [0.0]),
    }


def align(model: Any, base: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """What the base's attention gives, [L,B,T,C], the error of each layer and the gradient of their mean."""
    model.zero_grad()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    targets = collect_align_targets(base, inputs, linear_layers(model.config))
    found = model(align=targets, position_ids=batch["position_ids"], metadata=batch.get("metadata"))
    found.loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return {
        "targets": torch.stack(targets.outputs),
        "errors": found.layer_losses_L,
        "align_gradients": torch.cat(grads),
    }


def compare_in_bfloat16(case: dict[str, Any], group: Group, of_one: Group) -> dict[str, dict[str, float]]:
    """How far from float64 is bfloat16 of whole rows (`whole`), of shards (`shards`), and of shards that get nothing
    from their neighbors (`alone`); how far shards are from whole rows that take the same ops (`cut`). Of what a model
    and its alignment give: root mean squares, as a fraction of that of the float64 values."""
    generator = torch.Generator().manual_seed(1)
    model, batch = make_model(case, generator), rows(group.size, generator)
    torch.manual_seed(1)
    base_config = tiny_config(case.get("family", "llama"), **case.get("changes", {}))
    base = AutoModelForCausalLM.from_config(base_config).requires_grad_(False).eval()
    count = (batch["labels"][:, 1:] != -100).sum()
    own = slice(group.rank * SHARD, (group.rank + 1) * SHARD)

    def found(batch: dict[str, Any], dtype: torch.dtype, by: Group | None = None) -> dict[str, Tensor]:
        student = copy.deepcopy(model).to(torch.float64 if dtype == torch.float64 else torch.float32)
        teacher = copy.deepcopy(base).to(dtype)
        if by is not None:
            for body in (student, teacher):
                by.install(body)
            batch = by.cut(batch)
        with autocast(CPU, dtype) if dtype == torch.bfloat16 else contextlib.nullcontext():
            aligned = align(student, teacher, batch)
            logits, _, grads = run(student, batch, count)
        gradients = torch.cat([x.flatten() for x in grads.values()])
        values = {"logits": logits, "gradients": gradients, **aligned}
        values = {name: x.double() for name, x in values.items()}
        if by is None:
            return values
        return {name: x if name in OF_TOKENS else by.total(x) for name, x in values.items()}

    def own_tokens(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x[..., own, :] if name in OF_TOKENS else x for name, x in values.items()}

    def away(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
        def squares(x: Tensor) -> Tensor:
            return group.total(x.square().sum())

        return {name: float((squares(ours[name] - x) / squares(x)).sqrt()) for name, x in theirs.items()}

    exact, whole = (own_tokens(found(batch, dtype)) for dtype in (torch.float64, torch.bfloat16))
    same_ops = own_tokens(found(batch, torch.bfloat16, of_one))
    shards = found(batch, torch.bfloat16, group)
    with (
        mock.patch.object(Group, "send", return_value=None),
        mock.patch.object(Group, "receive", lambda _group, like, _source: torch.zeros_like(like)),
    ):
        alone = found(batch, torch.bfloat16, group)
    return {
        "whole": away(whole, exact),
        "shards": away(shards, exact),
        "alone": away(alone, exact),
        "cut": away(shards, same_ops),
    }


def given_to_fused_attention(case: dict[str, Any], group: Group) -> dict[str, Any]:
    """The dtypes in which softmax layers give a row of one document to torch's fused kernels, under autocast, and for
    each process the number of scores that these then take."""
    generator, found, scores = torch.Generator().manual_seed(1), set[str](), [0] * group.size
    model, batch = make_model(case, generator), rows(group.size, generator)
    real = CausalBias._dispatch

    def dispatch(*inputs: Any, **options: Any) -> Tensor:
        found.update(str(x.dtype).removeprefix("torch.") for x in inputs[:3])
        heads, tokens, end = *inputs[0].shape[1:3], inputs[1].shape[2]
        scores[group.rank] += heads * sum(range(end - tokens + 1, end + 1))
        return real(*inputs, **options)

    group.install(model)
    batch = group.cut({name: x[-1:] for name, x in batch.items()})
    with mock.patch.object(CausalBias, "_dispatch", staticmethod(dispatch)), autocast(CPU, torch.bfloat16):
        run(model, batch, torch.tensor(1))
    each = torch.tensor(scores)
    dist.all_reduce(each, group=group.group)
    return {"dtypes": sorted(found), "scores": each.tolist()}


OF_TOKENS = ("logits", "targets")  # the rest is of all tokens

if __name__ == "__main__":
    torch.set_num_threads(1)
    group, of_one = (group_of(CPU, size) for size in (int(os.environ["WORLD_SIZE"]), 1))
    for case in json.loads(Path(sys.argv[1]).read_text()):
        found: dict[str, Any]
        if case.get("fused"):
            found = given_to_fused_attention(case, group)
        else:
            found = compare_in_bfloat16(case, group, of_one) if case.get("bfloat16") else compare(case, group)
        if group.rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()
