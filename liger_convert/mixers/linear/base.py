"""Base classes of the mixers with the diagonal recurrence: feature maps, rotary, the gate, and the norm of the read.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, F feature size, V value size.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, Combine, HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.calibration import Calibration
from liger_convert.mixers.feature_maps import POSITIVE, Codebook
from liger_convert.mixers.gates import GateName, pool_to
from liger_convert.mixers.kernel_maps import RANDOM, WEIGHTS, MapName, make_map, map_size
from liger_convert.mixers.linear.diagonal import DiagonalMixer
from liger_convert.mixers.read_pieces import START_SIZE, normed
from liger_convert.mixers.spec import GateProjSpec, ReadGateSpec


@dataclass(frozen=True)
class LinearSpec(ReadGateSpec):
    """Options of linear attention.

    feature_map: phi, which turns queries and keys into the features of the state (see feature_maps.py and
        kernel_maps.py).
    codes: the number of codes of `feature_map: codebook`, which is also its feature size. Other maps ignore it.
    normalize: whether the read is divided by its normalizer phi(q) z, which makes it a weighted mean of values.
        Otherwise each head's read gets an RMS norm with a learned scale per channel. `combine: shared` needs the
        normalizer.
    rope: whether the memory uses queries and keys after rotary, as the window does, instead of before.
    """

    combine: Combine = "learned"
    feature_map: MapName = "identity"
    codes: int = 256
    normalize: bool = False
    rope: bool = False

    def problem(self) -> str | None:
        if self.normalize and self.feature_map not in WEIGHTS:
            allowed = ", ".join(POSITIVE)
            return f"feature_map: {self.feature_map} gives negative weights, which normalize cannot use; use {allowed}"
        if self.codes < 1:
            return f"codes: {self.codes} is too few; use 1 or more"
        if self.combine == "shared" and not self.normalize:
            return "combine: shared needs the memory's normalizer; use normalize: true, or combine: learned"
        return super().problem()


class LinearMixer(DiagonalMixer):
    """Linear attention: nothing is forgotten (a = 1) unless a subclass defines a gate.

    Without a normalizer, the state grows with the sequence. Each head's read then gets an RMS norm with a learned scale
    per channel. The papers do the same, with GroupNorm in RetNet and mLSTM, and RMSNorm in Lightning and Mamba2.
    """

    gate_rule = "none"
    spec: LinearSpec

    def __init__(self, spec: LinearSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.normalize = spec.normalize
        self.features = map_size(spec.feature_map, dims.dim, spec.codes)
        self.codebook: Codebook | None = None
        self.q_map: Any = None
        self.k_map: Any = None
        if spec.feature_map == "codebook":
            self.codebook = Codebook(spec.codes, dims.heads, dims.kv_heads, dims.dim)
        else:
            self.q_map = make_map(spec.feature_map, dims.heads, dims.dim)
            # random features estimate a kernel only if queries and keys use the same directions
            if spec.feature_map not in RANDOM:
                self.k_map = make_map(spec.feature_map, dims.kv_heads, dims.dim)
        if self.rescales:
            self.size_HV = nn.Parameter(torch.empty(dims.heads, dims.dim))

    @property
    def rescales(self) -> bool:
        """Whether the read is RMS-normalized and scaled."""
        return not self.normalize

    def calibration(self) -> Calibration:
        codebooks = () if self.codebook is None else (self.codebook,)
        return Calibration(codebooks, read_size=self.size_HV if self.rescales else None)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for map_ in (self.codebook, self.q_map, self.k_map):
            if map_ is not None:
                map_.reset_parameters()
        if self.rescales:
            init.constant_(self.size_HV, START_SIZE)

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, LinearSpec)
        size = (dims.kv_heads, map_size(spec.feature_map, dims.dim, spec.codes))
        return {"state": (*size, dims.dim)} | ({"z": size} if spec.normalize else {})

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return (dims.dim,)

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        return (qkv.k_rot_BTGD if self.spec.rope else qkv.k_BTGD,)

    def query_features(self, qkv: QKV) -> Tensor:
        q_BTHD = qkv.q_rot_BTHD if self.spec.rope else qkv.q_BTHD
        phi_BTHF: Tensor
        phi_BTHF = self.q_map(q_BTHD) if self.codebook is None else self.codebook(lambda codes: codes.queries(q_BTHD))
        return phi_BTHF

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        phi_BTGF: Tensor
        if self.codebook is None:
            phi_BTGF = (self.k_map or self.q_map)(inputs[-1])
        else:
            phi_BTGF = self.codebook(lambda codes: codes.keys(inputs[-1]))
        return phi_BTGF

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0].new_zeros(*inputs[0].shape[:-1], 1, dtype=torch.float32)

    def read(self, o_BTHV: Tensor, normalizer_BTH: Tensor | None) -> MemoryOutput:
        memory = super().read(o_BTHV, normalizer_BTH)
        return MemoryOutput(self.rescale(memory.o_BTHV), memory.log_normalizer_BTH) if self.rescales else memory

    def rescale(self, o_BTHV: Tensor) -> Tensor:
        """The RMS-normalized read at its learned scale."""
        return normed(o_BTHV, self.size_HV)


@dataclass(frozen=True)
class GatedSpec(LinearSpec, GateProjSpec):
    """Options of a gate whose logits are pooled keys plus a learned bias.

    gate: where the logits come from. `pooled` averages or repeats the key's channels to one logit per feature. `head`
        averages all of them to one logit per key-value head. `learned` multiplies the key by a learned matrix, which
        starts as that pooling. `constant` uses the learned bias alone, whatever the token is. `none` has no gate, so
        nothing is forgotten.
    gate_bias: where the bias starts. In a sigmoid gate, a larger value makes the memory last longer: what was written
        falls to 1/e of its weight after about e^bias tokens. With 7, that is 1,100 tokens.
    """

    gate: GateName = "pooled"
    gate_bias: float = 7.0

    @property
    def pools_to_codes(self) -> bool:
        """Whether a `pooled` gate has a value for each code of a codebook."""
        return False

    def problem(self) -> str | None:
        has_channels = self.feature_map not in ("products", "codebook")
        if self.feature_map == "codebook" and self.gate == "pooled":
            has_channels = self.pools_to_codes
        if self.gate in ("pooled", "learned") and not has_channels:
            which = "have no channel for each feature of"
            return f"gate: {self.gate} keys {which} {self.feature_map}; use another gate, or feature_map: hedgehog"
        if self.gate_proj and self.gate == "none":
            return "gate_proj: adds to a gate, and gate: none has none; use another gate, such as constant"
        return super().problem()


class GatedMixer(LinearMixer):
    """A gate's logits are pool(k) + b: the pretrained keys, pooled without new weights, plus a learned bias.

    With `gate_proj`, a projection of the layer's input is added. Subclasses define log a as a function of the logits. A
    `scalar` gate has one value per head for every `gate` option.
    """

    scalar: ClassVar[bool] = False
    spec: GatedSpec

    def __init__(self, spec: GatedSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.gates = self.gate_sizes(spec, dims)
        for name, size in self.gates.items():
            self.register_parameter(f"{name}_bias_GF", nn.Parameter(torch.empty(dims.kv_heads, size)))
            if spec.gate == "learned":
                pool = torch.empty(dims.kv_heads, dims.dim, size)
                self.register_parameter(f"{name}_pool_GDF", nn.Parameter(pool))

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        assert isinstance(spec, GatedSpec)
        if spec.gate == "none":
            return {}
        is_scalar = cls.scalar or spec.gate == "head"
        return {"gate": 1 if is_scalar else map_size(spec.feature_map, dims.dim, spec.codes)}

    def first_bias(self, name: str) -> float:
        """Where the bias of the logits called `name` starts."""
        return self.spec.gate_bias

    def calibration(self) -> Calibration:
        biases = tuple(getattr(self, f"{name}_bias_GF") for name in self.gates)
        return super().calibration()._replace(gate_biases=biases)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name in self.gates:
            bias_GF = getattr(self, f"{name}_bias_GF")
            init.constant_(bias_GF, self.first_bias(name))
            if self.spec.gate == "learned":
                pool_GDF = getattr(self, f"{name}_pool_GDF")
                each_channel = torch.eye(self.dims.dim, dtype=pool_GDF.dtype, device=pool_GDF.device)
                init.copy_(pool_GDF, pool_to(each_channel, bias_GF.shape[1]).expand_as(pool_GDF))

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        assert isinstance(spec, GatedSpec)
        return *cls.projected_sizes(spec, dims), *((dims.dim, dims.dim) if spec.rope else (dims.dim,))

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        # the gate is pooled from keys before rotary: their channels mean the same at every position
        keys = (qkv.k_BTGD, qkv.k_rot_BTGD) if self.spec.rope else (qkv.k_BTGD,)
        return self.with_projected_gates(keys, qkv)

    def gate_logits(self, inputs: tuple[Tensor, ...], name: str = "gate") -> Tensor:
        """The logits called `name` in float32, [B,T,G,F] or [B,T,G,1]."""
        k_BTGD, bias_GF = self.gate_key(inputs), getattr(self, f"{name}_bias_GF").float()
        logits = bias_GF if self.spec.gate == "constant" else self.pooled_logits(k_BTGD, name) + bias_GF
        return self.plus_projection(logits, inputs, name).expand(*k_BTGD.shape[:2], *bias_GF.shape)

    def pooled_logits(self, k_BTGD: Tensor, name: str) -> Tensor:
        """What a gate that depends on the key makes of it, in float32, [B,T,G,F] or [B,T,G,1]."""
        if self.spec.gate == "learned":
            pool_GDF = getattr(self, f"{name}_pool_GDF").float()
            return torch.einsum("btgd,gdf->btgf", k_BTGD.float(), pool_GDF)
        return pool_to(k_BTGD, self.gates[name])

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.decay(self.gate_logits(inputs)) if self.gates else super().log_gate(inputs)

    @abstractmethod
    def decay(self, logits: Tensor) -> Tensor:
        """log a <= 0, computed from the gate's logits."""
