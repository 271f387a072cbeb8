"""Sharded weights: each process of a stage holds a slice of every tensor, its gradient and its moments (FSDP2).

A decoder layer is a unit: its weights are gathered when it runs, forward and backward, and given up behind it. Its
mixer is a unit of its own, as it computes in float32 where the base's weights are gathered in the compute dtype.
Gradients are reduced in float32. An alignment runs the attention of the linearized layers and nothing around it, so
there each attention is a unit, too: the gathering is done by hooks of the module that is called.

`fully_shard` is called here and not left to accelerate's plugin, which is off on a CPU, where the tests run, wraps by
the names of classes, and knows no unit of another dtype. transformers' own sharded loading cannot resume a training.

The first process reads the weights and sends them unit by unit, so that no GPU holds more than one whole unit, and the
memory of the machine holds the model once. The others begin with a model that has no storage.

Sources: fully sharded data parallelism (FSDP, 2304.11277; ZeRO, 1910.02054), torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed import DeviceMesh, broadcast, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from liger_convert.config.stages import Stage
from liger_convert.model import MIXER_MODULE, linear_layers
from liger_convert.model.bases import attention_option
from liger_convert.utils import processes


def mesh_of(device: torch.device) -> DeviceMesh:
    """All processes of the run, in one row. All call it."""
    PartialState(cpu=device.type == "cpu")  # makes them a group where they are none yet
    return init_device_mesh(device.type, (processes.count(),))


def why_not_sharded(stage: Stage, dtype: torch.dtype) -> str | None:
    """Why processes that compute in `dtype` cannot share the weights of this stage, beginning with the field; None if
    they can. Each row's magnitude is divided by its size, and gathered in bfloat16 both are off by up to 0.4%."""
    if stage.lora is None or stage.lora.variant != "dora" or dtype == torch.float32:
        return None
    rounded = f"dora's magnitudes would be rounded to {str(dtype).removeprefix('torch.')}"
    return f"lora.variant: {rounded} where processes share the weights; set sharding: none, or use another variant"


def without_weights(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The causal language model of `config` in the mode of evaluation; its parameters, of `dtype` where that is given,
    have no storage."""
    with init_empty_weights(include_buffers=False):  # buffers follow from the config
        options = attention_option(config) | ({} if dtype is None else {"dtype": dtype})
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()  # which the line above undid
    return model.eval()


def shard_student(model: Any, mesh: DeviceMesh, dtype: torch.dtype, *, aligns: bool) -> Any:
    """Shards the model that a stage trains, in place, and returns it. Its adapters are there, and what is frozen has no
    gradient. All processes call it; the weights are those of the first.

    What is frozen is held in the compute dtype, but for the mixers; what is trained in float32.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and f".{MIXER_MODULE}." not in name and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    _take_dtypes(model)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # the sum that layers add to stays in float32, as without sharding
        whole.get_input_embeddings().register_forward_hook(lambda _module, _args, output: output.float())
    linear = linear_layers(whole.config)
    for i, layer in enumerate(whole.model.layers):
        if i in linear:
            # small, so it stays gathered until its backward pass
            mixer = getattr(layer.self_attn, MIXER_MODULE)
            _unit([mixer], mesh, MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=False)
            if aligns:
                _unit([layer.self_attn], mesh, policy)
        _unit([layer], mesh, policy)
    if aligns:  # never runs them, so they are never gathered
        _unit([whole.get_input_embeddings(), whole.get_output_embeddings()], mesh, policy)
    _unit([model], mesh, policy, reshard_after_forward=aligns)
    return model


def shard_base(base: Any, mesh: DeviceMesh, *, aligns: bool) -> Any:
    """Shards the frozen teacher, in place, in the dtypes it has, and returns it. All processes call it. With `aligns`
    its head, which alignment does not run, stays where it is."""
    _take_dtypes(base)
    for layer in base.model.layers:
        _unit([layer], mesh)
    _unit([base.model if aligns else base], mesh, reshard_after_forward=True)
    return base


def shard_to_calibrate(model: Any, mesh: DeviceMesh) -> Any:
    """Shards the backbone of the linearized `model`, in place, in float32, and returns the model. Each process has the
    mixers in full, to be fitted by all alike. The head, which a fit does not run, stays where it is."""
    _take_dtypes(model)
    for layer in model.model.layers:
        _place([layer], mesh)
        mixers = {p for name, p in layer.named_parameters() if f".{MIXER_MODULE}." in name}
        fully_shard(layer, mesh=mesh, ignored_params=mixers)
    _unit([model.model], mesh)
    return model


def mixers_of(model: Any) -> dict[str, Tensor]:
    """The mixers' parameters, by name, where each process has them in full."""
    return {name: p.detach().cpu() for name, p in model.named_parameters() if f".{MIXER_MODULE}." in name}


def give_up(model: nn.Module) -> None:
    """Has each process hold its slices only, after a forward pass with no backward pass behind it; nothing for a model
    that is not sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather_trained(model: Any, into: nn.Module) -> None:
    """Copies what is trained of the sharded `model`, one whole tensor at a time, to a plain one of the same names that
    has no storage: in the first process. All call it."""
    processes.barrier()  # the first may have read for longer than a collective waits
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            full = parameter.full_tensor()
            if processes.is_first():
                path, _, own = name.rpartition(".")
                into.get_submodule(path)._parameters[own] = nn.Parameter(full.cpu())


@torch.no_grad()
def copy_whole(into: Tensor, whole: Tensor) -> None:
    """Copies a tensor, of which `into` may be sharded; then this process takes its slice."""
    if not isinstance(into, DTensor):
        into.copy_(whole)
        return
    slices = whole.chunk(into.device_mesh.size(), 0)  # as FSDP2 cuts: the last processes may have none
    rank = into.device_mesh.get_local_rank()
    if rank < len(slices):
        into.to_local().copy_(slices[rank])


def _unit(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    *,
    reshard_after_forward: bool | None = None,
) -> None:
    """Makes `modules` a unit of what in them belongs to none yet."""
    _place(modules, mesh)
    options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    given: Any = modules[0] if len(modules) == 1 else list(modules)
    fully_shard(given, mesh=mesh, reshard_after_forward=reshard_after_forward, **options)


def _take_dtypes(model: nn.Module) -> None:
    """Gives parameters without storage the dtypes that the first process has loaded."""
    processes.barrier()  # it may read for longer than a collective waits
    (dtypes,) = broadcast_object_list([{name: p.dtype for name, p in model.named_parameters()}])
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def _place(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Brings what is not sharded yet to the device, with the values of the first process; tied weights stay tied."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in (inner for outer in modules for inner in outer.modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in placed:
                given = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach()
                value = given.to(device).contiguous()
                broadcast(value, 0)
                placed[parameter] = nn.Parameter(value, parameter.requires_grad)
            module._parameters[name] = placed[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = value = buffer.to(device).contiguous()
                broadcast(value, 0)
