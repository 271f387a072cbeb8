"""The base class of the mixers with the diagonal recurrence: its entries, its scan, and the normalizer of the read.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size. States are float32.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from gated_kernels.fused_step.arguments import MIN_NORMALIZER
from gated_kernels.gla.chunk import chunk_gla
from torch import Tensor

from liger_convert.mixers.base import QKV, MemoryOutput, Mixer
from liger_convert.mixers.precision import multiplies_in_bf16

if TYPE_CHECKING:
    from liger_convert.model.sequence import WriteMask


class DiagonalMixer(Mixer):
    """S_t = diag(a_t) S_{t-1} + phi(k_t)^T v_t, read by phi(q_t); subclasses define phi and a.

    With `normalize` there is a second state, z_t = diag(a_t) z_{t-1} + phi(k_t). The read is divided by the normalizer
    phi(q_t) z_t, which makes it a weighted mean of values at any length. The shared denominator also needs the
    normalizer. The last entry is then a boolean write mask, which decides whether the key is added to z.
    """

    recurrence = "gla"
    normalize: bool = True

    @abstractmethod
    def query_features(self, qkv: QKV) -> Tensor:
        """phi(q) [B,T,H,F]."""

    @abstractmethod
    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """phi(k) [B,T,G,F]."""

    @abstractmethod
    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """log a <= 0, [B,T,G,F] or [B,T,G,1]."""

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        entries = self.key_features(inputs), v_BTGV, self.log_gate(inputs)
        if not self.normalize:
            return entries
        write_mask_BTG1 = v_BTGV.new_ones(*v_BTGV.shape[:3], 1, dtype=torch.bool)
        return *entries, write_mask_BTG1

    def write_masked(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor, mask: WriteMask) -> tuple[Tensor, ...]:
        if not self.normalize or type(self).write is not DiagonalMixer.write:
            return super().write_masked(inputs, v_BTGV, mask)
        # a key may stay: the state gets its product with a value of 0, and z gets it by the mask
        v_BTGV, log_a = (x.masked_fill(mask.left_out_BT11, 0) for x in (v_BTGV, self.log_gate(inputs)))
        return self.key_features(inputs), v_BTGV, log_a, mask.written_BTG1

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        q_BTHF = self.query_features(qkv)
        o_BTHV, normalizer_BTH, state = self.attend(
            q_BTHF,
            entries,
            initial_state=with_normalizer(states),
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )
        memory = self.read(*self.add_current(qkv, q_BTHF, entries, o_BTHV, normalizer_BTH))
        if memory.normalizer_BTH is None:  # else it may be too large for float16
            memory = memory._replace(read_BTHV=memory.read_BTHV.to(qkv.v_BSGD.dtype))
        return memory, {"state": state[..., :-1], "z": state[..., -1]} if self.normalize else {"state": state}

    def attend(
        self, q_BTHF: Tensor, entries: tuple[Tensor, ...], **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Runs the recurrence over the entries from `write`.

        Returns phi(q) S [B,T,H,V], the normalizer [B,T,H] or None, and the state; with `normalize`, its last column is
        z. `options` are those of `gated_kernels.chunk_gla`.
        """
        k_BTGF, v_BTGV, log_a, *written = entries
        if multiplies_in_bf16(v_BTGV):
            q_BTHF, k_BTGF = q_BTHF.to(v_BTGV.dtype), k_BTGF.to(v_BTGV.dtype)
        else:
            v_BTGV = v_BTGV.float()
        written_BTG = written[0][..., 0] if written else None
        return chunk_gla(q_BTHF, k_BTGF, v_BTGV, log_a, write_mask_BTG=written_BTG, **options)

    def add_current(
        self,
        qkv: QKV,
        q_BTHF: Tensor,
        entries: tuple[Tensor, ...],
        o_BTHV: Tensor,
        normalizer_BTH: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Adds a query's read of its own token, outside the state, to the result of `attend`; by default nothing."""
        return o_BTHV, normalizer_BTH

    def read(self, o_BTHV: Tensor, normalizer_BTH: Tensor | None) -> MemoryOutput:
        """The memory's output from the result of `attend`."""
        if normalizer_BTH is None:
            return MemoryOutput(o_BTHV, None)
        normalizer_BTH = normalizer_BTH.clamp_min(MIN_NORMALIZER)
        return MemoryOutput(o_BTHV, None, normalizer_BTH)


def with_normalizer(states: dict[str, Tensor]) -> Tensor | None:
    """The state [B,G,F,V] in the ops' layout, with z [B,G,F] appended as last column if present; None at the start."""
    if "z" not in states:
        return states.get("state")
    return torch.cat((states["state"], states["z"][..., None]), -1)
