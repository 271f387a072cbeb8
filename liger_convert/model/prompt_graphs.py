"""Reading prompts on a GPU with one CUDA graph per linear layer.

A linear layer runs many short kernels. Launching them from Python takes several times as long as running them, so a
prompt would be read at the speed of the host. A graph launches all kernels of a layer at once.

A graph has fixed shapes. So a prompt is read in chunks (see LinearizedForCausalLM.prefill_chunk). The first chunk is
padded on the left to a multiple of STEP tokens. All others have the same number of tokens. Embeddings, softmax layers,
the last norm and the head run as usual, without the padding. The first chunk of a kind runs the same operations without
a graph, since a capture would take longer than it saves for a single prompt.

The graphs read and write tensors at fixed addresses. They are kept from one prompt to the next, as long as no part of
the model has changed. A prompt's cache gets its own tensors when the prompt has been read.

Shapes: B rows, N new tokens of a chunk, T tokens of a graph, C hidden size, D rotary size, P tokens in the ring, W its
capacity.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gated_kernels.common.registry import all_kernels
from gated_kernels.common.tracing import reads_no_values
from torch import Tensor, nn
from transformers.utils import logging

from liger_convert.model.attention import LinearizedAttention, hand_on_metadata
from liger_convert.model.cache import CACHE, LinearizedCacheLayer
from liger_convert.model.cuda_graphs import SharedMemory, record, without_cached_casts, without_waiting
from liger_convert.model.decoding import on_one_gpu, why_not_captured
from liger_convert.model.fused_modules import Forward, with_forwards
from liger_convert.model.fused_norms import fused_norms
from liger_convert.model.module_snapshot import ModuleSnapshot
from liger_convert.model.prompt_buffers import Chunks, Kind, LayerState
from liger_convert.model.sequence import SequenceMetadata

logger = logging.get_logger(__name__)

STEP = 256  # the first chunk is padded to a multiple of this
MOST_ROWS = 8  # with more rows, running the kernels takes longer than launching them
REPLACED = {"attention_mask", "position_ids", CACHE, "position_embeddings", "metadata", "use_cache"}


class Run(NamedTuple):
    """One chunk that is being read: the linear layers by index, the tensors of its kind, and its number of tokens."""

    linear: dict[int, Any]
    chunks: Chunks
    tokens: int


class PromptReader:
    """Reads the prompts of a linearized model. Used by its backbone, see LinearizedModel.forward.

    status: how the last prompt was read, in words.
    """

    def __init__(self) -> None:
        self.status = "none yet"
        self._lock = threading.Lock()
        self._allowed = True
        # what the graphs were made with, and why there are none
        self._snapshot: ModuleSnapshot | None = None
        self._settings: tuple[Any, ...] = ()
        self._failed: str | None = None
        self._norms: dict[int, dict[nn.Module, Forward]] = {}  # of each layer, those that run in a kernel
        # the prompt that is being read
        self._cache: Any = None
        self._chunk = 0
        self._passed: Tensor | None = None  # the output of the layer before, a view of `x_BTC`
        self._given_angles: list[tuple[Tensor, ...]] = []
        # tensors and graphs
        self._rows = 0
        self._states: dict[int, LayerState] = {}
        self._chunks_of: dict[Kind, Chunks] = {}
        self._memory: SharedMemory | None = None

    def __reduce__(self) -> Any:  # a copy of a model, or a model from a file, makes its own graphs
        return PromptReader, ()

    @contextlib.contextmanager
    def disabled(self, disable: bool | None) -> Iterator[None]:
        """Context in which prompts are read without graphs, if `disable` is true."""
        before, self._allowed = self._allowed, self._allowed and not disable
        try:
            yield
        finally:
            self._allowed = before

    @contextlib.contextmanager
    def reading(self, model: Any, cache: Any, chunk: int) -> Iterator[None]:
        """Context in which the chunks of one prompt are read into `cache`, which is complete at its end.

        chunk: the most tokens of a chunk.
        """
        if not self._lock.acquire(blocking=False):  # another thread is reading a prompt
            yield
            return
        try:
            reason = self._why_plain(model)
            self.status = "plain chunks" if reason is None else f"plain chunks: {reason}"
            if reason is None:
                self._cache, self._chunk = cache, chunk
            yield
            self._complete()
        finally:
            self._cache = None
            for state in self._states.values():
                state.is_newer = False
            self._lock.release()

    def layers_for(
        self, backbone: Any, cache: Any, metadata: SequenceMetadata
    ) -> contextlib.AbstractContextManager[Any]:
        """Context for the backbone's forward over one chunk. In it, linear layers run in graphs, if they can."""
        if self._cache is None or cache is not self._cache:
            return contextlib.nullcontext()
        linear = _linear(backbone)
        kind = self._kind(linear, cache, metadata)
        if kind is None:
            self._complete()
            return contextlib.nullcontext()
        return self._captured_layers(linear, cache, metadata, kind)

    # --- which chunks

    def _why_plain(self, model: Any) -> str | None:
        """Why a prompt is read without graphs, or None. Forgets the graphs if the model is no longer what it was."""
        if not has_gpu(model):
            return "there is no Nvidia GPU"
        if not self._allowed:
            return "disable_compile asks for it"
        if reads_no_values():
            return "the model is being traced or captured"
        settings, linear = _settings(), _linear(model.model)
        if self._snapshot is None or settings != self._settings or not self._snapshot.still_holds(linear.values()):
            self.forget()
            self._snapshot, self._settings = ModuleSnapshot(linear.values()), settings
            self._failed = why_no_graphs(model, linear)
            norms = fused_norms(linear.values()) if self._failed is None else {}
            self._norms = {i: {x: norms[x] for x in layer.modules() if x in norms} for i, layer in linear.items()}
        return self._failed

    def _kind(self, linear: dict[int, Any], cache: Any, metadata: SequenceMetadata) -> Kind | None:
        """The kind of a chunk; None if there are no graphs for it."""
        rows, tokens = metadata.position_BT.shape
        usual = metadata.order_BT is None and metadata.segment_ids_BT is None and not metadata.static
        if rows > MOST_ROWS:
            self.status = f"plain chunks: more than {MOST_ROWS} rows"
        if self._failed is not None or not usual or rows > MOST_ROWS:
            return None
        positions = [cache.layers[i].positions for i in linear]
        if all(position is None for position in positions):
            return Kind(min(-(-tokens // STEP) * STEP, self._chunk), True)
        if tokens != self._chunk or metadata.valid_BT is not None:
            return None
        if any(position is None or position.ring_position is not None for position in positions):
            return None
        if rows == self._rows and not all(self._states[i].fits(cache.layers[i]) for i in linear if i in self._states):
            return None
        return Kind(tokens, False)

    # --- one chunk

    @contextlib.contextmanager
    def _captured_layers(
        self, linear: dict[int, Any], cache: Any, metadata: SequenceMetadata, kind: Kind
    ) -> Iterator[None]:
        self.status = "captured chunks"
        with torch.inference_mode(False), torch.no_grad():
            chunks = self._begin(linear, cache, metadata, kind)
        run = Run(linear, chunks, metadata.tokens)
        for i, layer in linear.items():
            layer.forward = self._forward_of(i, run)
        try:
            yield
        finally:
            self._passed, self._given_angles = None, []
            for layer in linear.values():
                del layer.forward
        chunks.seen = True

    def _begin(self, linear: dict[int, Any], cache: Any, metadata: SequenceMetadata, kind: Kind) -> Chunks:
        """Copies what is known before the first layer to the fixed addresses."""
        rows, device = len(metadata.position_BT), metadata.position_BT.device
        if rows != self._rows:
            self._complete()
            self._drop_graphs()
            self._rows = rows
        if kind not in self._chunks_of:
            self._chunks_of[kind] = Chunks(kind, rows, device)
        chunks = self._chunks_of[kind]
        chunks.copy_metadata(metadata)
        copied = set()
        for i, layer in linear.items():
            spec = layer.self_attn.spec
            key = spec.cache_window, spec.sinks
            if i not in self._states:
                self._states[i] = LayerState(spec.cache_window)
            if kind.is_new:
                continue
            state, given = self._states[i], cache.layers[i]
            if not state.is_newer:
                state.write(given)
                state.held = given.positions.position_BP.shape[1]
            if key not in copied:
                chunks.copy_positions(key, given.positions)
                copied.add(key)
        return chunks

    def _forward_of(self, i: int, run: Run) -> Callable[..., Any]:
        """What runs instead of the forward of layer `i`."""
        layer, cache = run.linear[i], self._cache

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            # another thread may run the model meanwhile, with a cache of its own
            if self._failed is None and not args and kwargs.get(CACHE) is cache:
                try:
                    with torch.inference_mode(False), torch.no_grad(), without_cached_casts():
                        return self._layer(i, run, hidden_states, kwargs)
                except RuntimeError as error:
                    self._give_up(str(error).splitlines()[0])
            return type(layer).forward(layer, hidden_states, *args, **kwargs)

        return forward

    def _layer(self, i: int, run: Run, x_BNC: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The output [B,N,C] of layer `i`. Raises RuntimeError if it cannot run with fixed shapes."""
        layer, chunks, start = run.linear[i], run.chunks, run.chunks.kind.tokens - run.tokens
        if chunks.x_BTC is None:
            chunks.x_BTC = x_BNC.new_zeros(len(x_BNC), chunks.kind.tokens, x_BNC.shape[2])
        x_BTC = chunks.x_BTC
        if x_BTC.dtype != x_BNC.dtype:
            raise RuntimeError("its layers have inputs of different dtypes")
        if x_BNC is not self._passed:
            x_BTC[:, :start].zero_()
            x_BTC[:, start:].copy_(x_BNC)
        options = {
            name: value
            for name, value in kwargs.items()
            if name not in REPLACED and value is not None and value is not False
        }
        if any(isinstance(value, Tensor) for value in options.values()):
            raise RuntimeError(f"its layers take further tensors: {', '.join(sorted(options))}")
        if chunks.options.setdefault(i, options) != options:
            raise RuntimeError("its layers get other arguments than for the prompt before")
        angles = self._copied_angles(chunks, start, kwargs.get("position_embeddings"))
        state = self._states[i]

        def device_work() -> None:
            past = self._past(i, layer, chunks)
            embeddings: tuple[Any, ...] = chunks.angles[angles]
            if len(kwargs["position_embeddings"]) == 3:
                embeddings = (*embeddings, chunks.metadata)
            inputs = {**options, "position_embeddings": embeddings, CACHE: _Layers({i: past})}
            if "metadata" in kwargs:
                inputs["metadata"] = chunks.metadata
            with with_forwards(self._norms[i]):
                output_BTC = type(layer).forward(layer, x_BTC, attention_mask=None, position_ids=None, **inputs)
            if not isinstance(output_BTC, Tensor) or output_BTC.dtype != x_BTC.dtype:
                raise RuntimeError("its layers return something else than hidden states of the dtype of their input")
            x_BTC.copy_(output_BTC)
            state.write(past)

        if self._passed is None:  # the first layer of the chunk
            self._prepare_metadata(run)
        if not chunks.seen:
            with without_waiting():
                device_work()
        else:
            if i not in chunks.replays:
                chunks.replays[i] = record(device_work, self._shared())
            chunks.replays[i]()
        before = 0 if chunks.kind.is_new else state.held
        state.held, state.is_newer = min(state.cache_window, before + run.tokens), True
        self._passed = x_BTC[:, start:]
        # others may keep what they get, and the next graph overwrites it
        return self._passed if i + 1 in run.linear else self._passed.clone()

    def _past(self, i: int, layer: Any, chunks: Chunks) -> LinearizedCacheLayer:
        """The cache of layer `i` before the chunk, at fixed addresses; empty before the first one."""
        spec = layer.self_attn.spec
        before = None if chunks.kind.is_new else chunks.before[spec.cache_window, spec.sinks]
        return self._states[i].as_cache(before)

    def _prepare_metadata(self, run: Run) -> None:
        """Makes what all layers know about the chunk's tokens."""
        chunks = run.chunks

        def device_work() -> None:
            chunks.metadata = SequenceMetadata(chunks.kind.tokens, chunks.position_BT, chunks.valid_BT)
            for i, layer in run.linear.items():
                layer.self_attn.prepare_metadata(chunks.metadata, self._past(i, layer, chunks))

        if not chunks.seen:
            device_work()
            return
        if chunks.replay_metadata is None:
            chunks.replay_metadata = record(device_work, self._shared())
        chunks.replay_metadata()

    def _copied_angles(self, chunks: Chunks, start: int, given: Any) -> int:
        """The index in `chunks.angles` of the cos and sin that a layer gets. Layers may get different ones."""
        pair = given[:2] if isinstance(given, tuple) and len(given) in (2, 3) else ()
        if len(pair) != 2 or not all(isinstance(x, Tensor) and x.dim() == 3 for x in pair):
            raise RuntimeError("its layers get no cos and sin of the positions")
        for index, (cos, _) in enumerate(self._given_angles):
            if cos is pair[0]:
                return index
        index = len(self._given_angles)
        self._given_angles.append(pair)
        shapes = [(self._rows, chunks.kind.tokens, x.shape[2]) for x in pair]
        if index == len(chunks.angles):
            chunks.angles.append(tuple(x.new_zeros(shape) for x, shape in zip(pair, shapes, strict=True)))
        for x, kept, shape in zip(pair, chunks.angles[index], shapes, strict=True):
            if kept.shape != shape or kept.dtype != x.dtype:
                raise RuntimeError("its layers get other cos and sin than for the prompt before")
            kept[:, start:].copy_(x)
        return index

    # --- the cache of the prompt, and what is kept

    def _complete(self) -> None:
        """Gives the prompt's cache its own tensors."""
        for i, state in self._states.items():
            if state.is_newer:
                state.copy_to(self._cache.layers[i])

    def _give_up(self, reason: str) -> None:
        """Reads the rest of this prompt, and all others until the model changes, without graphs."""
        self._complete()
        self._drop_graphs()
        self._failed, self.status = reason, f"plain chunks: {reason}"
        logger.warning_once(f"prompts are read more slowly than they could be, without CUDA graphs: {reason}")

    def forget(self) -> None:
        """Drops all graphs, so that their memory can be used again."""
        self._snapshot, self._settings, self._failed, self._cache = None, (), None, None
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        self._rows, self._states, self._chunks_of, self._memory = 0, {}, {}, None
        self._passed, self._given_angles = None, []

    def _shared(self) -> SharedMemory:
        self._memory = self._memory or SharedMemory()
        return self._memory


class _Layers(NamedTuple):
    """What a layer's forward uses of a cache."""

    layers: dict[int, LinearizedCacheLayer]


def has_gpu(model: Any) -> bool:
    """Whether a model is on a GPU."""
    return bool(model.device.type == "cuda")


def why_no_graphs(model: Any, linear: dict[int, Any]) -> str | None:
    """The reason why no prompt of a model on a GPU can be read with graphs, or None."""
    if not linear:
        return "no layer is linearized"
    if not on_one_gpu(model):
        return "the model is on several devices"
    if (reason := why_not_captured(model)) is not None:
        return reason
    if any(type(parameter) is not nn.Parameter for layer in linear.values() for parameter in layer.parameters()):
        return "its weights are quantized, and not plain tensors at one address"
    if not all(layer.self_attn.spec.window for layer in linear.values()):
        return "an unlimited window grows with the prompt"
    for layer in linear.values():
        for module in layer.modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if any(hook is not hand_on_metadata for hook in hooks):
                return "forward hooks are set on its layers"
            if "forward" in vars(module):
                return "the forward method of a module was replaced"
    return None


def _linear(backbone: Any) -> dict[int, Any]:
    """The decoder layers with linearized attention, by index."""
    return {
        i: layer
        for i, layer in enumerate(backbone.layers)
        if isinstance(getattr(layer, "self_attn", None), LinearizedAttention)
    }


def _settings() -> tuple[Any, ...]:
    """What else decides which kernels run. A graph keeps those of its capture."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        all_kernels(),
    )
