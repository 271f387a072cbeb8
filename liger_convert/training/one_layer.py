"""Models with only one layer in memory at a time, for layerwise training.

A `OneLayer` runs the family's own forward pass, including its masks and rotary embeddings, with every layer but one
replaced by the identity. So the remaining layer gets the same arguments as in the whole model, in every family.

Shapes: B batch, T tokens, C hidden size.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from liger_convert.mixers import SOFTMAX
from liger_convert.model import AlignTargets, collect_align_targets, linear_layers
from liger_convert.training.align import AlignObjective
from liger_convert.training.hidden_states import HiddenStates
from liger_convert.training.sharding import without_weights
from liger_convert.training.trainer import StageTrainer

Read = Callable[[str], Tensor]


class OneLayer:
    """The backbone of a base or linearized model on `device`. Either its embeddings or one layer are loaded at a time.

    names: the names of the tensors in its checkpoint. read: returns one of them. dtype: of the loaded weights. The
    attribute `model` is the model itself, on the meta device; layers that are not loaded pass their input through.
    """

    def __init__(self, config: Any, names: Iterable[str], read: Read, device: torch.device, dtype: torch.dtype):
        self.names, self.read, self.device = list(names), read, device
        self.model = without_weights(config, dtype).requires_grad_(False)
        self.backbone = self.model.model
        for module in self.backbone.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        for module in (*self.backbone.layers, self.backbone.norm):
            module.forward = _hand_on
        self._given: Tensor | None = None
        self._output: Tensor | None = None

    @contextlib.contextmanager
    def embeddings(self) -> Iterator[None]:
        """Context in which the embeddings are loaded, for `embed`."""
        with self._loaded(self.backbone.embed_tokens, "model.embed_tokens."):
            yield

    @torch.no_grad()
    def embed(self, input_ids_BT: Tensor) -> Tensor:
        """[B,T,C]: the inputs of the first layer."""
        x_BTC: Tensor = self.backbone(input_ids=input_ids_BT.to(self.device), use_cache=False).last_hidden_state
        return x_BTC

    @contextlib.contextmanager
    def layer(self, number: int) -> Iterator[Any]:
        """Context in which decoder layer `number` is loaded, for `run` and `targets`. Yields the layer."""
        layer = self.backbone.layers[number]
        with self._loaded(layer, f"model.layers.{number}."):
            del layer.forward
            hooks = [
                layer.register_forward_pre_hook(lambda _layer, args: (self._given, *args[1:])),
                layer.register_forward_hook(self._keep),
            ]
            try:
                yield layer
            finally:
                for hook in hooks:
                    hook.remove()
                layer.forward = _hand_on

    @torch.no_grad()
    def run(self, x_BTC: Tensor, position_ids_BT: Tensor) -> Tensor:
        """[B,T,C]: the output of the loaded layer for the input `x_BTC`."""
        self._given = x_BTC
        self.backbone(inputs_embeds=x_BTC, position_ids=position_ids_BT, use_cache=False)
        return self._taken()

    def targets(self, x_BTC: Tensor, position_ids_BT: Tensor | None, number: int) -> tuple[AlignTargets, Tensor]:
        """The inputs and outputs of the attention of the loaded layer, `number`, and the layer's output [B,T,C].

        Without positions, every row is one document.
        """
        self._given = x_BTC
        batch: dict[str, Any] = {"inputs_embeds": x_BTC, "position_ids": position_ids_BT}
        targets = collect_align_targets(self.model, batch, [number])
        return targets, self._taken()

    def _keep(self, _layer: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        self._output = output

    def _taken(self) -> Tensor:
        output, self._given, self._output = self._output, None, None
        assert output is not None
        return output

    @contextlib.contextmanager
    def _loaded(self, module: nn.Module, prefix: str) -> Iterator[None]:
        load_tensors(self.model, {name: self.read(name) for name in self.names if name.startswith(prefix)}, self.device)
        module.requires_grad_(False)
        try:
            yield
        finally:
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        part._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), False)


class LayerObjective(AlignObjective):
    """The loss of layer `number`, divided by the number of linear layers, `layers`: its part of the mean over layers.

    before: the hidden states before the layer. after: where to write those after it; None if nothing is to be written.
    batches: the rows of each batch, in order. taken: how many of these batches an earlier attempt has taken.

    A call is nothing but work of the device, so that it can be captured as a CUDA graph. The hidden states before the
    layer are part of its batch, as `hidden`: `read` them before. It leaves those after the layer in `outputs`: `write`
    them.
    """

    def __init__(
        self,
        base: OneLayer,
        number: int,
        layers: int,
        before: HiddenStates,
        after: HiddenStates | None,
        batches: Sequence[range],
        taken: int,
    ):
        self.one, self.base, self.number, self.count = base, base.model, number, layers
        self.before, self.after, self.batches, self.taken = before, after, batches, taken
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = super().__call__(model, batch) / self.count
        return loss

    def _targets(self, batch: dict[str, Tensor]) -> AlignTargets:
        targets, output_BTC = self.one.targets(batch["hidden"], batch.get("position_ids"), self.number)
        self.outputs = () if self.after is None else (output_BTC,)
        return targets

    def read(self, ids_BT: Tensor) -> Tensor:
        """[B,T,C]: the hidden states before the layer, of the next batch, whose tokens are `ids_BT`."""
        x_NTC = read_batch(self.before, self.batches, self.taken)
        self.taken += 1
        return x_NTC.view(*ids_BT.shape, -1)  # rows may be cut into pieces

    def write(self, outputs: Iterable[Tensor]) -> None:
        """Writes `outputs`, which a pass left for the batch that was read last. There are none without an `after`."""
        for output_BTC in outputs:
            assert self.after is not None
            self.after.write(self.batches[self.taken - 1].start, output_BTC)
        self.outputs = ()

    def wait_until_idle(self) -> None:
        """Waits until no other thread uses the GPU for hidden states. It will again from the next `read` or `write`
        on."""
        for states in (self.before, self.after):
            if states is not None:
                states.wait_until_idle()

    def flush(self) -> None:
        """Waits until the hidden states after the layer are on disk."""
        if self.after is not None:
            self.after.flush()


def read_batch(states: HiddenStates, batches: Sequence[range], at: int) -> Tensor:
    """[N,T,C]: the rows of `batches[at]`. Those of the batch behind it are read ahead."""
    following = batches[at + 1].start if at + 1 < len(batches) else states.rows
    return states.read(batches[at].start, len(batches[at]), following)


class LayerTrainer(StageTrainer):
    """Trains one layer. Hidden states are read before each pass and written after it, so that it can be captured."""

    objective: LayerObjective

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        hidden = {"hidden": self.objective.read(inputs["input_ids"])}
        loss = super().training_step(model, inputs | hidden, num_items_in_batch)
        self.objective.write(self.fwd_bwd.copies if self.eager is None else self.objective.outputs)
        return loss

    def _given(self, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None) -> dict[str, Tensor]:
        given = super()._given(inputs, num_items_in_batch)
        if "hidden" in given:
            return given
        # of a batch whose turn is yet to come, only the shapes are asked for
        hidden = torch.empty(*given["input_ids"].shape, self.objective.before.shape[1], device="meta")
        counted = given.pop("counted")
        return given | {"hidden": hidden, "counted": counted}  # in the order that they have at their turn

    def _outputs(self) -> tuple[Tensor, ...]:
        return self.objective.outputs

    def _before_capture(self) -> None:
        self.objective.wait_until_idle()


def attention_only(config: Any, number: int) -> Any:
    """The linearized causal language model of `config`, reduced to the attention of layer `number`.

    It is in float32, on the meta device, and keeps the parameter names of the whole model. It can only be aligned.
    """
    own = copy.deepcopy(config)
    layers = config.linearization["layers"]
    only = [name if i == number else SOFTMAX for i, name in enumerate(layers)]
    own.linearization = config.linearization | {"layers": only}
    model = without_weights(own, torch.float32)
    backbone, kept = model.model, nn.Module()
    kept.self_attn = backbone.layers[number].self_attn
    backbone.layers = nn.ModuleList(kept if i == number else nn.Identity() for i in range(len(layers)))
    backbone.embed_tokens, backbone.norm, model.lm_head = nn.Identity(), nn.Identity(), nn.Identity()
    assert linear_layers(own) == [number]
    return model


def load_tensors(model: Any, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Loads `tensors` into `model` on `device`. tensors: by their names in the checkpoint.

    This uses transformers' own loading, which fuses tensors that are stored separately, such as experts. Raises
    RuntimeError if a tensor does not fit.
    """
    mapping: Any = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(device_map={"": str(device)}, dtype=model.dtype, weight_mapping=mapping)
    found, _ = convert_and_load_state_dict_in_model(model, tensors, options)
    if found.unexpected_keys or found.mismatched_keys or found.conversion_errors:
        raise RuntimeError(f"transformers has no place for {sorted(found.unexpected_keys) or found.conversion_errors}")


def _hand_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states
