"""The linearized models: thin subclasses of each family's unmodified Hugging Face classes, generated per family.

Shapes: B batch, T tokens, C hidden size, L linearized layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from gated_kernels.common.tracing import is_exporting
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)
from transformers.utils import logging

from liger_convert.mixers import build_mixer
from liger_convert.mixers.base import Branches, Mixer
from liger_convert.model.alignment import AlignOutput, AlignTargets, row_sizes
from liger_convert.model.attention import MIXER_MODULE, LinearizedAttention, hand_on_metadata, head_dims
from liger_convert.model.cache import CACHE, adopt_cache, advance, one_cache
from liger_convert.model.configuration import CONFIGS, FORMAT, linear_layers
from liger_convert.model.decoding import Decoder, why_plain
from liger_convert.model.families import FAMILIES, family_of
from liger_convert.model.heads import head_classes
from liger_convert.model.output_head import HeadLoss, OutputHead
from liger_convert.model.packing import document_positions
from liger_convert.model.prompt_graphs import PromptReader
from liger_convert.model.quantized_weights import QuantizedWeights
from liger_convert.model.rotary import length_limit
from liger_convert.model.sequence import PACKED_CACHE, SequenceMetadata

logger = logging.get_logger(__name__)


Inputs = dict[str, Tensor | None]
OF_ALL_TOKENS = ("output_attentions", "output_hidden_states", "output_router_logits")


class LinearizedInit(QuantizedWeights):
    """Initializes a mixer's parameters when transformers creates them; otherwise they would be uninitialized memory.
    Saves a model with the code that its config names.

    write_code: writes that code to a folder. The package sets it, because a later subpackage collects the code. In an
        export, transformers copies the code.
    """

    write_code: ClassVar[Callable[[Path, Any], None] | None] = None

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """transformers' from_pretrained, which initializes missing tensors randomly and only warns. Raises ValueError
        if a mixer's are missing from the files, unless the caller asks for the loading info, which lists them."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if output_loading_info:
            return model, info
        lost = sorted(name for name in info["missing_keys"] if f".{MIXER_MODULE}." in name)
        if lost and kwargs.get("state_dict") is None:  # with a state_dict, no files are read
            what = f"{len(lost)} tensors of its mixers are missing, such as {lost[0]}"
            raise ValueError(f"{model.config.name_or_path}: {what}; the model is damaged, get it again")
        return model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> Any:
        """transformers' save_pretrained, plus the code of a model that was loaded from an export."""
        saved = super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        write_code = type(self).write_code
        if write_code is not None and is_main_process and getattr(self.config, "auto_map", None):
            write_code(Path(save_directory), self.config)
        return saved

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Mixer):
            module.reset_parameters()


class LinearizedModel(LinearizedInit):
    """The backbone: builds the batch's metadata and the cache layers; the family's class does the rest."""

    config: Any
    layers: Any
    gradient_checkpointing: bool
    prompts: PromptReader

    def __init__(self, config: Any):
        super().__init__(config)
        linearize_layers(self, config)
        self.post_init()  # the family's own call ran before the mixers existed

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Any = None,
        metadata: SequenceMetadata | None = None,
        **kwargs: Any,
    ) -> Any:
        """The family's forward, except that `attention_mask` must be 2-D.

        Packed documents are given by `position_ids` that restart (or by `cu_seq_lens_q` or `seq_idx`), without a mask
        and without a cache. use_cache=None then makes no cache, and use_cache=True raises ValueError.

        metadata: precomputed by some callers; the mask then only concerns the softmax layers. past_key_values: the name
        of `cache` in transformers before 5.24.
        """
        cache = one_cache(cache, past_key_values, self.config.linearization["layers"])
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("pass either input_ids or inputs_embeds")
        documents = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
        if any(told is not None for told in documents):
            position_ids = document_positions(given.shape[0], given.shape[1], position_ids, *documents)
        if metadata is None and cache is None:
            cached = self.config.use_cache if use_cache is None else use_cache
            metadata = SequenceMetadata.build(given, position_ids, attention_mask, cached=cached)
            if use_cache and metadata.segment_ids_BT is not None:
                raise ValueError(PACKED_CACHE)
        if use_cache is None:
            use_cache = self.config.use_cache and (metadata is None or metadata.segment_ids_BT is None)
        if self.training and self.gradient_checkpointing:
            if cache is not None:
                raise ValueError(
                    "gradient checkpointing leaves a cache empty in training mode: call model.eval() before generate, "
                    "or pass use_cache=False"
                )
            use_cache = False
        if is_exporting() and (use_cache or cache is not None):
            raise ValueError("torch.export supports a linearized model only without its cache: pass use_cache=False")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        linear = linear_layers(self.config)
        past = None
        if cache is not None:
            adopt_cache(cache, self.config.linearization["layers"])
            past = cache.layers[linear[0]] if linear else None
        if metadata is None:
            metadata = SequenceMetadata.build(
                given, position_ids, attention_mask, None if past is None else past.positions, cached=True
            )
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(given.shape[1], device=given.device) + start)[None]
        if past is None:
            prepare_metadata(self, metadata)
        if len(linear) == len(self.layers):
            # no layer uses the family's mask; a 4-D one keeps the family from building a [tokens, tokens] mask
            attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=given.device)
        with self.prompts.layers_for(self, cache, metadata):
            output = super().forward(
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=use_cache,
                metadata=metadata,
                **{CACHE: cache},
                **kwargs,
            )
        if past is not None:
            pasts = [cache.layers[i] for i in linear]
            windows = [
                self.layers[i].self_attn.window_metadata(metadata.to(cached.device), cached)
                for i, cached in zip(linear, pasts, strict=True)
            ]
            advance(pasts, windows, metadata)
        return output


FULL_ROWS = 8  # up to this many rows, a chunk has `prefill_chunk` tokens; with more rows it is shorter
LEAST_CHUNK = 64  # tokens per row: shorter chunks would be slow
PREFILL_CHUNK = 2048


class LinearizedForCausalLM(LinearizedInit):
    """The family's causal language model on the linearized backbone; `align=` runs only its attention layers.

    prefill_chunk: prefill with a cache that needs only the last tokens' logits, as in generation, reads this many
    tokens at a time, or fewer with more than FULL_ROWS rows. Its memory, apart from the cache, then depends neither on
    the prompt length nor, down to chunks of LEAST_CHUNK tokens, on the batch size. With None, a prompt is read in one
    piece, as is one beyond the `length_limit` of the base's rotary embedding.
    """

    _backbone: Any
    config: Any
    model: Any
    prefill_chunk: int | None = PREFILL_CHUNK
    decoding = "none yet"  # a description of how the last generation's steps ran

    def __init__(self, config: Any):
        super().__init__(config)
        # the family built its stock backbone; it becomes the linearized one in place, so parameter names stay the same
        self.model.__class__ = self._backbone
        # transformers registers what a class can record (hidden states) when it is instantiated; an empty one suffices
        PreTrainedModel.__init__(self._backbone.__new__(self._backbone), config)
        linearize_layers(self.model, config)
        self.model.post_init()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        align: AlignTargets | None = None,
        head_loss: HeadLoss | None = None,
        **kwargs: Any,
    ) -> Any:
        """The family's forward, with two additional modes.

        align: returns an AlignOutput, the alignment loss of the linearized layers on the base's activations.
        head_loss: returns only the loss that it computes from all hidden states and the output head, or from the
        logits and None where the head is not a plain linear layer. It is called inside forward, where wrappers have
        gathered the head's weights.

        past_key_values: the name of `cache` in transformers before 5.24.

        `position_ids`, `logits_to_keep` and `labels` must be in the signature, because generation and `Trainer` inspect
        it. Without `position_ids`, rows of a padded batch would start at wrong positions. Without `logits_to_keep`, the
        logits of the whole prompt would be computed. Without `labels`, `Trainer` would drop the labels column and
        evaluate without a loss.
        """
        cache = one_cache(cache, past_key_values, self.config.linearization["layers"])
        if align is not None:
            return self._align(align, position_ids, attention_mask, kwargs.get("metadata"))
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        inputs["attention_mask"] = attention_mask
        if head_loss is not None:
            head = OutputHead.of(self)
            if head is None:
                states_BTX = super().forward(**inputs, **kwargs).logits
            else:
                states_BTX = self.model(**inputs, **kwargs).last_hidden_state
            return CausalLMOutputWithPast(loss=head_loss(states_BTX.flatten(0, 1), head))
        of_all_tokens = any(kwargs.get(name, getattr(self.config, name, False)) for name in OF_ALL_TOKENS)
        options = {CACHE: cache, "labels": labels, "logits_to_keep": logits_to_keep, **kwargs}
        chunk = None
        if cache is not None and not of_all_tokens and not torch.is_grad_enabled():
            chunk = self._chunk(inputs, cache, logits_to_keep)
        if chunk is None:
            if self.training:
                self.model.prompts.forget()
            return super().forward(**inputs, **options)
        with self.model.prompts.reading(self, cache, chunk):
            return super().forward(**self._read_ahead(inputs, cache, chunk), **options)

    def _chunk(self, inputs: Inputs, cache: Any, logits_to_keep: int | Tensor) -> int | None:
        """The tokens of a chunk in which the inputs, a prompt, may be read; None if they must be read at once."""
        given = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
        chunk = self.prefill_chunk
        if given is None or chunk is None or given.shape[1] < 2:  # one token is a step of decoding
            return None
        if (rows := len(given)) > FULL_ROWS:
            chunk = min(chunk, max(LEAST_CHUNK, chunk * FULL_ROWS // rows))
        limit = length_limit(self.config)
        if limit is not None and cache.get_seq_length() + given.shape[1] > limit:
            return None
        return chunk if isinstance(logits_to_keep, int) and 0 < logits_to_keep <= chunk else None

    def _read_ahead(self, inputs: Inputs, cache: Any, chunk: int) -> Inputs:
        """Reads all but the last chunk of a prompt into the cache; returns the inputs of the last chunk."""
        tokens = next(x.shape[1] for x in (inputs["input_ids"], inputs["inputs_embeds"]) if x is not None)
        if tokens <= chunk:
            return inputs

        def part(start: int, end: int) -> Inputs:
            cut = {name: None if x is None else x[:, start:end] for name, x in inputs.items()}
            if (mask := inputs["attention_mask"]) is not None:  # also covers the tokens in the cache
                cut["attention_mask"] = mask[:, : mask.shape[1] - tokens + end]
            return cut

        ends = range(tokens % chunk or chunk, tokens, chunk)  # the first chunk takes the remainder
        for start, end in zip((0, *ends), ends):
            self.model(**part(start, end), cache=cache, use_cache=True)
        return part(tokens - chunk, tokens)

    def _align(
        self,
        targets: AlignTargets,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        metadata: SequenceMetadata | None,
    ) -> AlignOutput:
        backbone = self.model
        if metadata is None:
            metadata = SequenceMetadata.build(targets.hidden[0], position_ids, attention_mask)
        prepare_metadata(backbone, metadata)
        valid_BT = None if metadata.valid_BT is None else metadata.restored(metadata.valid_BT)
        sizes_LB: Any = [None] * len(targets.layers)
        if metadata.past is not None:  # one reduction for all layers: each one makes every process wait for the slowest
            sizes_LB = metadata.past.total(torch.stack([row_sizes(y, valid_BT) for y in targets.outputs]))
        losses = []
        for i, x_BTC, y_BTC, embeddings, size_B in zip(
            targets.layers, targets.hidden, targets.outputs, targets.position_embeddings, sizes_LB, strict=True
        ):

            def layer_loss(
                x: Tensor, y: Tensor, embeddings: Any = embeddings, i: int = i, size_B: Tensor | None = size_B
            ) -> Tensor:
                o, _ = backbone.layers[i].self_attn(x, position_embeddings=embeddings, metadata=metadata)
                return self.relative_error(o, y, valid_BT, size_B)

            if backbone.gradient_checkpointing and self.training:
                loss = torch.utils.checkpoint.checkpoint(layer_loss, x_BTC, y_BTC, use_reentrant=False)
            else:
                loss = layer_loss(x_BTC, y_BTC)
            losses.append(loss)
        losses_L = torch.stack(losses)
        return AlignOutput(loss=losses_L.mean(), layer_losses_L=losses_L.detach())

    @staticmethod
    def relative_error(o_BTC: Tensor, y_BTC: Tensor, valid_BT: Tensor | None, size_B: Tensor | None = None) -> Tensor:
        """The squared error of a layer's output relative to its target's squared norm; padding does not count.

        size_B: the target's squared norm over the whole row. For a shard of a row the result is the shard's
        contribution to the row's error.
        """
        error_B = row_sizes(o_BTC.float() - y_BTC.float(), valid_BT)
        if size_B is None:
            size_B = row_sizes(y_BTC, valid_BT)
        # per row, so that the loss of a batch equals the mean over its micro-batches
        return (error_B / size_B.clamp_min(torch.finfo(torch.float32).tiny)).mean()

    def _prefill(self, input_ids: Tensor, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        with self.model.prompts.disabled(generation_config.disable_compile):
            return super()._prefill(input_ids, generation_config, *args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r} is not supported for a linearized "
                "model, whose cache is constant in size already; leave it out"
            )
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if model_kwargs.get(CACHE) is not None:
            adopt_cache(model_kwargs[CACHE], self.config.linearization["layers"])
        return prepared

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` looks at its signature
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, with the cache by both of its names: by the new one alone, PEFT 0.21 does not find it, and
        reads the virtual tokens of prompt tuning again at every step."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if CACHE in inputs:
            inputs["past_key_values"] = inputs[CACHE]
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses transformers' continuous batching, through which `generate_batch` and the cache "paged" go: it keeps
        keys and values in pages, and has no place for states."""
        raise ValueError(
            "continuous batching (generate_batch, or cache_implementation 'paged') is not supported for a linearized "
            "model; serve it with vLLM instead (`linearize serve`), or leave cache_implementation out"
        )

    @property
    def prefilling(self) -> str:
        """How the last prompt was read, in words."""
        return str(self.model.prompts.status)

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Whether `generate` calls the result of `get_compiled_call` instead of the model at every step."""
        if generation_config.disable_compile or generation_config.compile_config is not None:
            reason: str | None = "disable_compile or compile_config asks for it"
        elif model_kwargs.get(CACHE) is None:
            reason = "there is no cache"
        else:
            reason = why_plain(self)
        self.decoding = "plain steps" if reason is None else f"plain steps: {reason}"
        if reason is not None:
            logger.info_once(f"decoding uses plain steps: {reason}")
        return reason is None

    def get_compiled_call(self, compile_config: Any) -> Any:
        """A Decoder, which compiles nothing; `generate(disable_compile=True)` bypasses it."""
        return Decoder(self)


def prepare_metadata(backbone: Any, metadata: SequenceMetadata) -> None:
    """Precomputes what layers share, before any of them runs, so that compiled layers share one graph."""
    for i in linear_layers(backbone.config):
        backbone.layers[i].self_attn.prepare_metadata(metadata)


def linearize_layers(backbone: Any, config: Any) -> None:
    """Replaces the attention of the linearized layers in place. Raises ValueError for a config of another format, and
    for one with another number of layers than it names mixers for, as where someone loads only the first layers."""
    if (given := config.linearization["format"]) != FORMAT:
        raise ValueError(
            f"config.json: linearization.format is {given}, but this code reads {FORMAT}; use the code beside it"
        )
    if (count := config.num_hidden_layers) != (named := len(config.linearization["layers"])):
        raise ValueError(
            f"config.json: num_hidden_layers is {count}, but linearization.layers names {named} layers; "
            "shorten or extend both alike"
        )
    backbone.prompts = PromptReader()
    for i in linear_layers(config):
        backbone.layers[i].self_attn = LinearizedAttention(backbone.layers[i].self_attn, config, i)
        if not family_of(config).passes_kwargs:
            backbone.layers[i].register_forward_pre_hook(hand_on_metadata, with_kwargs=True)


def _classes(model_type: str) -> tuple[type, type, type]:
    config: Any = CONFIGS[model_type]
    base_backbone: Any = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
    base_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    common = {
        "__module__": __name__,
        "config_class": config,
        "_can_compile_fullgraph": False,
        "_is_stateful": True,
        # gates near 1 and memory logits need more than bfloat16's 8 bits of precision; these parameters are small
        "_keep_in_fp32_modules_strict": [MIXER_MODULE],
    }
    if FAMILIES[model_type].softcap:
        common["_supports_sdpa"] = False  # sdpa ignores the softcap
    # transformers looks for a decorator in the source of a class's module, and without it runs experts one by one
    common["_can_set_experts_implementation"] = classmethod(lambda cls: base_lm._can_set_experts_implementation())
    backbone = type(f"Linearized{base_backbone.__name__}", (LinearizedModel, base_backbone), common)
    lm = type(f"Linearized{base_lm.__name__}", (LinearizedForCausalLM, base_lm), {**common, "_backbone": backbone})
    conversion = get_checkpoint_conversion_mapping(model_type)
    if conversion is not None:
        register_checkpoint_conversion_mapping(config.model_type, conversion, overwrite=True)
    AutoModel.register(config, backbone, exist_ok=True)
    AutoModelForCausalLM.register(config, lm, exist_ok=True)
    # Trainer's label smoothing only shifts labels for classes in this table
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = lm.__name__
    HEAD_CLASSES[model_type] = head_classes(model_type, config, LinearizedInit, common)
    globals().update({cls.__name__: cls for cls in (config, backbone, lm, *HEAD_CLASSES[model_type].values())})
    return config, backbone, lm


HEAD_CLASSES: dict[str, dict[str, type]] = {}  # by the base's model_type, then by the name of the Auto class
CLASSES: dict[str, tuple[type, type, type]] = {model_type: _classes(model_type) for model_type in CONFIGS}


def new_state(config: Any, seed: int = 0, layers: list[int] | None = None) -> dict[str, Tensor]:
    """The freshly initialized mixer tensors, float32, by full name: all that a linearized model adds to its base.

    layers: restricts the result to these linearized layers; the values do not change.
    """
    state = {}
    with torch.random.fork_rng(devices=[]):
        for i in linear_layers(config) if layers is None else layers:
            torch.manual_seed(seed + i)
            mixer = build_mixer(config.linearization["mixers"][config.linearization["layers"][i]], head_dims(config))
            mixer.reset_parameters()
            prefix = f"model.layers.{i}.self_attn.{MIXER_MODULE}."
            state.update({prefix + name: tensor for name, tensor in mixer.state_dict().items()})
    return state


def set_branches(model: nn.Module, branches: Branches) -> None:
    """Enables `both` branches of every linearized layer, or only the `window` or the `memory`. Not saved."""
    for module in model.modules():
        if isinstance(module, LinearizedAttention):
            module.branches = branches


def take_auxiliary_loss(model: nn.Module) -> Tensor | float:
    """The sum of the auxiliary losses that the mixers computed in the last forward pass in training, or 0.0.

    Add it to the loss before the backward pass. A second call returns 0.0. Gradient checkpointing must be
    non-reentrant, so that the first pass also records this loss.
    """
    total: Tensor | float = 0.0
    for module in model.modules():
        if isinstance(module, Mixer) and module.auxiliary_loss is not None:
            total = total + module.auxiliary_loss
            module.auxiliary_loss = None
    return total
