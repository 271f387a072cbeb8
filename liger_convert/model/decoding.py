"""Decoding with fixed shapes; on a GPU each step replays one captured CUDA graph.

After prefill, every cache tensor gets its final shape. On a GPU, steps then update it in place. Positions and padding
are tensors, so a captured graph contains no constant that changes between steps. `generate` calls a Decoder instead of
the model (LinearizedForCausalLM.get_compiled_call). The Decoder passes every call that is not a one-token step on to
the model.

Shapes: B batch, S tokens so far, or the capacity of the softmax layers where that is fixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from liger_convert.mixers import SOFTMAX, make_spec
from liger_convert.model.cache import CACHE, LinearizedCacheLayer, StaticSoftmaxLayer
from liger_convert.model.cuda_graphs import WARM_UP, capture
from liger_convert.model.fused_modules import with_forwards
from liger_convert.model.fused_norms import fused_norms
from liger_convert.model.fused_projections import are_read_as_stored, fused_projections
from liger_convert.model.sequence import SequenceMetadata

logger = logging.get_logger(__name__)

ROOM = 256  # softmax layers grow by this many tokens: they attend over their full capacity; each growth recaptures
NEEDED = {"input_ids", "position_ids", CACHE}
# a step honors or may ignore these; the last is an older name of the cache, see `prepare_inputs_for_generation`
HARMLESS = {"attention_mask", "use_cache", "return_dict", "logits_to_keep", "past_key_values"}

# ids [B,1], positions [B or 1,1], softmax mask [B,S] or None -> logits
Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Decoder:
    """Runs the decode steps of one generation; `model.decoding` describes how they run.

    in_place: keep every tensor at its address and give softmax layers a fixed capacity, as a capture requires. The
    default is True on one GPU only: a CPU is faster attending to the tokens so far than to a larger, masked buffer, and
    a graph is of one GPU. A CPU keeps only linear layers' tensors in place, if the fused step takes all these layers.
    """

    def __init__(self, model: Any, in_place: bool | None = None):
        self.model = model
        self.in_place = on_one_gpu(model) if in_place is None else in_place
        self.cache: Any = None
        self.linear: list[LinearizedCacheLayer] = []
        self.softmax: list[StaticSoftmaxLayer] = []
        self.fused = {**fused_norms([model]), **fused_projections(model)} if self.in_place else {}
        self.step: Step = self._step

    def __call__(self, **inputs: Any) -> Any:
        """The model's forward: same inputs and outputs."""
        cache, mask_BS = inputs.get(CACHE), inputs.get("attention_mask")
        if not (is_step := _is_step(inputs)) or _has_padding(mask_BS):
            self.cache = None
            if is_step:  # a row whose token is padding keeps its ring, but all rows' rings turn together
                self.model.decoding = "plain steps: a new token is padding"
            return self.model(**inputs)
        fresh = cache is not self.cache or any(layer.length == layer.room for layer in self.softmax)
        if fresh:
            self._to_static(cache)
        ids_B1, length = inputs["input_ids"], self.linear[0].length
        if mask_BS is None:
            mask_BS = ids_B1.new_ones(len(ids_B1), length + 1)
        if self.softmax:
            mask_BS = F.pad(mask_BS, (0, self.softmax[0].room - mask_BS.shape[1]))
        elif self.in_place:
            mask_BS = None  # there are no softmax layers
        given = ids_B1, inputs["position_ids"], mask_BS
        if fresh:
            self.step = self._captured(given)
        logits = self.step(*given)
        for layer in self._layers():
            layer.length = length + 1  # a graph replay runs no Python
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})

    def _to_static(self, cache: Any) -> None:
        self.cache, self.linear, self.softmax, attentions = cache, [], [], []
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, LinearizedCacheLayer):
                self.linear.append(layer)
                attentions.append(self.model.model.layers[i].self_attn)
            elif self.in_place:
                dynamic = layer.to_dynamic() if isinstance(layer, StaticSoftmaxLayer) else layer
                cache.layers[i] = StaticSoftmaxLayer(dynamic, ((dynamic.get_seq_length() + WARM_UP) // ROOM + 1) * ROOM)
                self.softmax.append(cache.layers[i])
        for layer in self.linear:
            layer.softmax = self.softmax[0] if self.softmax else None
        in_torch = not self.in_place and self.model.device.type == "cpu"
        for attention, layer in zip(attentions, self.linear, strict=True):
            layer.to_static(attention.spec.cache_window, self.in_place or in_torch)
            if layer.in_place:
                attention.enable_fused_step(layer, in_torch)
        # without a kernel, only the fused step has a use for tensors in place, and linear layers share positions
        if in_torch and not all(layer.fused for layer in self.linear):
            for attention, layer in zip(attentions, self.linear, strict=True):
                layer.to_static(attention.spec.cache_window, in_place=False)

    def _step(self, ids_B1: Tensor, positions_B1: Tensor, mask_BS: Tensor | None) -> Tensor:
        with static_steps(self._layers()), with_forwards(self.fused), masks_without_copies():
            metadata = SequenceMetadata.build(ids_B1, positions_B1, None, self.linear[0].positions, static=True)
            inputs = {"input_ids": ids_B1, "position_ids": positions_B1, "attention_mask": mask_BS}
            return self.model(**inputs, metadata=metadata, cache=self.cache, use_cache=True).logits

    def _layers(self) -> list[Any]:
        return [*self.linear, *self.softmax]

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers() for tensor in layer.tensors()]

    def _captured(self, given: tuple[Tensor, Tensor, Tensor | None]) -> Step:
        """The step as a CUDA graph, or uncaptured if capture is not possible. Sets `model.decoding`."""
        fused = ", fused" if all(layer.fused for layer in self.linear) else ""
        self.model.decoding = f"fixed steps{fused}"
        if self.model.device.type != "cuda" or not self.in_place:
            return self._step
        reason = why_not_captured(self.model)
        if reason is None:
            try:
                step = capture(self._step, given, self._tensors)
            except RuntimeError as error:
                reason = f"the capture failed: {str(error).splitlines()[0]}"
            else:
                self.model.decoding = f"captured steps{fused}"
                logger.info_once("decoding replays a captured CUDA graph; disable_compile=True uses the plain loop")
                return step
        self.model.decoding = f"fixed steps{fused}, not captured: {reason}"
        logger.warning_once(f"decoding is slower than it could be because its step is not captured: {reason}")
        return self._step


def is_spread(model: Any) -> bool:
    """Whether the weights of `model` are on several devices, apart from those that are offloaded."""
    return len({parameter.device for parameter in model.parameters() if not parameter.is_meta}) > 1


def on_one_gpu(model: Any) -> bool:
    """Whether a model runs on one GPU, although some weights may be kept elsewhere until their module runs."""
    return model.device.type == "cuda" and not is_spread(model)


def why_plain(model: Any) -> str | None:
    """The reason why a linearized model cannot use a Decoder, or None if it can."""
    linearization = model.config.linearization
    if all(layer == SOFTMAX for layer in linearization["layers"]):
        return "no layer is linearized"
    if any(not make_spec(mixer).window for mixer in linearization["mixers"].values()):
        return "an unlimited window grows with every step"
    attention = model.config._attn_implementation
    if SOFTMAX in linearization["layers"] and model.device.type == "cuda" and attention not in ("sdpa", "eager"):
        return f"softmax layers use {attention}, whose masks cannot have a fixed shape"
    return None


def why_not_captured(model: Any) -> str | None:
    """The reason why a decode step on a GPU cannot be captured as a CUDA graph, or None if it can."""
    if model.training:
        return "the model is in training mode"
    if getattr(model, "is_quantized", False) and not are_read_as_stored(model):
        return "its weights are quantized, and the code that quantizes inputs makes tensors on the host"
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        return f"the model is spread over {', '.join(sorted(devices))}"
    return None


def _is_step(inputs: dict[str, Any]) -> bool:
    """Whether this call adds one token per row to a non-empty cache and asks for nothing but its logits."""
    given = {name for name, value in inputs.items() if value is not None and value is not False}
    if not (NEEDED | {"use_cache"} <= given <= NEEDED | HARMLESS):
        return False
    return inputs["input_ids"].shape[1] == 1 and inputs[CACHE].get_seq_length() > 0


def _has_padding(mask_BS: Tensor | None) -> bool:
    """Whether the new token of a row is padding."""
    return mask_BS is not None and not bool(mask_BS[:, -1].all())


@contextlib.contextmanager
def masks_without_copies() -> Iterator[None]:
    """Makes the masks of eager attention without a number from the host, which transformers before 5.21 copies to the
    GPU for each of them. A captured step may copy nothing from there."""
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = _eager_mask
    try:
        yield
    finally:
        with contextlib.suppress(KeyError):  # the step of another thread may have ended first
            del ALL_MASK_ATTENTION_FUNCTIONS["eager"]  # transformers' own is found again


def _eager_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    """0 where a key is visible, the lowest number elsewhere."""
    visible = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **{**kwargs, "allow_is_causal_skip": False})
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


@contextlib.contextmanager
def static_steps(layers: list[Any]) -> Iterator[None]:
    """Sets `static` on these cache layers for the duration of the block."""
    for layer in layers:
        layer.static = True
    try:
        yield
    finally:
        for layer in layers:
            layer.static = False
