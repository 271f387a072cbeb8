"""Sharded weights (FSDP2): each process of a stage holds a slice of every tensor, of its gradient and of its moments.

Each decoder layer is a unit. Its weights are gathered when it runs, forward and backward, and freed afterwards. Where
memory allows, layers stay gathered: the student's from the forward to the backward pass, the teacher's for the whole
stage, because its weights do not change. A step then gathers once instead of three times. Gradients are reduced in
float32.

Where the base's own weights are frozen, they are stored in the compute dtype, and all weights are gathered as they are
stored: adapters and mixers in float32. Where the base's weights are trained, they are stored in float32 and gathered in
the compute dtype. A mixer computes in float32, so it is then a unit of its own, but is gathered along with its layer.

FSDP gathers weights in hooks of the module that is called. They must run outside of what is compiled, so none are
inside of a layer. Alignment runs only the attention of the linearized layers, so there each attention is also a unit.

`fully_shard` is called here instead of through accelerate's plugin. The plugin is disabled on a CPU, where the tests
run, wraps modules by class name, and does not support units of different dtypes. transformers' own sharded loading
cannot resume training.

The first process reads the weights and broadcasts them unit by unit. So no GPU holds more than one whole unit, and the
machine's memory holds the model only once. The other processes start from a model on the meta device.

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

from liger_convert.model import MIXER_MODULE, linear_layers
from liger_convert.model.bases import attention_option
from liger_convert.training.adapters import adapted_model
from liger_convert.utils import processes


def mesh_of(device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh of all processes of the run. A collective call."""
    PartialState(cpu=device.type == "cpu")  # initializes torch.distributed if necessary
    return init_device_mesh(device.type, (processes.count(),))


def without_weights(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The causal language model of `config` in evaluation mode, with parameters on the meta device. dtype: of the
    parameters; None leaves it to the config."""
    with init_empty_weights(include_buffers=False):  # buffers are computed from the config
        options = attention_option(config) | ({} if dtype is None else {"dtype": dtype})
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()  # init_empty_weights unties them
    return model.eval()


def shard_student(
    model: Any, mesh: DeviceMesh, dtype: torch.dtype, *, aligns: bool, keep_gathered: bool = False
) -> Any:
    """Shards the model that a stage trains, in place, and returns it. A collective call.

    The model must already have its adapters, and its frozen parameters must not require gradients. The first process's
    weights are used. Frozen parameters outside the mixers are stored in the compute dtype `dtype`; all others are
    stored in float32. aligns: whether the stage is an alignment. keep_gathered: layers stay gathered from the forward
    to the backward pass.
    """
    whole = adapted_model(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and f".{MIXER_MODULE}." not in name and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    _take_dtypes(model)
    as_stored = policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        if _trains_body(model):
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # the residual stream stays in float32, as without sharding
        whole.get_input_embeddings().register_forward_hook(lambda _module, _args, output: output.float())
    linear = linear_layers(whole.config)
    for i, layer in enumerate(whole.model.layers):
        if i in linear:
            if policy is not as_stored:  # it is small, so it stays gathered until its backward pass
                mixer = getattr(layer.self_attn, MIXER_MODULE)
                _unit([mixer], mesh, as_stored, reshard_after_forward=False)
                _gather_with(layer.self_attn if aligns else layer, mixer)
            if aligns:
                _unit([layer.self_attn], mesh, policy)
        _unit([layer], mesh, policy, reshard_after_forward=not keep_gathered)
    if aligns:  # alignment does not run these, so they are never gathered
        _unit([whole.get_input_embeddings(), whole.get_output_embeddings()], mesh, policy)
    _unit([model], mesh, policy, reshard_after_forward=aligns)
    return model


def _trains_body(model: Any) -> bool:
    """Whether the base's own weights are trained, rather than adapters and mixers alone."""
    if isinstance(model, PeftModel):
        return False
    return any(p.requires_grad for name, p in model.named_parameters() if f".{MIXER_MODULE}." not in name)


def _gather_with(layer: nn.Module, mixer: nn.Module) -> None:
    """Lets the FSDP hooks of the unit `mixer` run when `layer`, which contains it, is called. A layer cannot be
    compiled as one graph if hooks run inside of it, and not at all with gradient checkpointing.

    FSDP has no public way to do this. These are the hooks that `fully_shard` registers in torch 2.11 to 2.13. A torch
    that keeps them elsewhere runs them inside of the layer, which costs only speed.
    """
    state: Any = fully_shard.state(mixer)  # type: ignore[attr-defined]
    handles = [getattr(state, name, None) for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle")]
    if None in handles:
        return
    for handle in handles:
        handle.remove()  # type: ignore[union-attr]
    layer.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    layer.register_forward_hook(state._post_forward)


def shard_base(base: Any, mesh: DeviceMesh, *, aligns: bool, keep_gathered: bool = False) -> Any:
    """Shards the frozen teacher, in place and in its own dtypes, and returns it. A collective call.

    aligns: whether the stage is an alignment. That does not run the teacher's head, which is then left as it is.
    keep_gathered: weights stay gathered after the first forward pass.
    """
    _take_dtypes(base)
    for layer in base.model.layers:
        _unit([layer], mesh, reshard_after_forward=not keep_gathered)
    _unit([base.model if aligns else base], mesh, reshard_after_forward=not keep_gathered)
    return base


def shard_to_calibrate(model: Any, mesh: DeviceMesh) -> Any:
    """Shards the backbone of the linearized `model`, in place, and returns the model. A collective call.

    The mixers are replicated, and each process fits all of them. Calibration does not run the head, which is left as it
    is.
    """
    _take_dtypes(model)
    for layer in model.model.layers:
        _place([layer], mesh)
        mixers = {p for name, p in layer.named_parameters() if f".{MIXER_MODULE}." in name}
        fully_shard(layer, mesh=mesh, ignored_params=mixers)
    _unit([model.model], mesh)
    return model


def mixers_of(model: Any) -> dict[str, Tensor]:
    """Copies of the mixers' parameters on the CPU, by name. The mixers must not be sharded."""
    return {name: p.detach().cpu() for name, p in model.named_parameters() if f".{MIXER_MODULE}." in name}


def give_up(model: nn.Module) -> None:
    """Frees the gathered weights, for use after a forward pass without a backward pass. Does nothing if the model is
    not sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather_trained(model: Any, into: nn.Module) -> None:
    """Gathers the trained parameters of the sharded `model`, one at a time, and stores them in `into` in the first
    process. A collective call. into: an unsharded model on the meta device with the same parameter names."""
    processes.barrier()  # the first process may have been reading for longer than the timeout of a collective
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            full = parameter.full_tensor()
            if processes.is_first():
                path, _, own = name.rpartition(".")
                into.get_submodule(path)._parameters[own] = nn.Parameter(full.cpu())


@torch.no_grad()
def copy_whole(into: Tensor, whole: Tensor) -> None:
    """Copies the unsharded tensor `whole` to `into`. If `into` is sharded, copies only this process's slice."""
    if not isinstance(into, DTensor):
        into.copy_(whole)
        return
    slices = whole.chunk(into.device_mesh.size(), 0)  # like FSDP2; the last processes may get nothing
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
    """Makes one FSDP unit of the parameters in `modules` that do not belong to a unit yet."""
    _place(modules, mesh)
    options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    given: Any = modules[0] if len(modules) == 1 else list(modules)
    fully_shard(given, mesh=mesh, reshard_after_forward=reshard_after_forward, **options)


def _take_dtypes(model: nn.Module) -> None:
    """Casts all parameters to the dtypes that they have in the first process, which has loaded the weights."""
    processes.barrier()  # the first process may read for longer than the timeout of a collective
    (dtypes,) = broadcast_object_list([{name: p.dtype for name, p in model.named_parameters()}])
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def _place(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Moves parameters that are not sharded yet, and buffers, to the device, with the first process's values. Tied
    weights stay tied."""
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
