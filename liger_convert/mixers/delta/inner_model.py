"""The inner model that TTT (2407.04620) and Titans (2501.00663) train on the tokens: options, initial weights, and op.

A matrix that takes one step per token is the plain delta rule and does not need this op (see `is_recurrent`).

y(x) = [x, 1] W                                          (model: linear)
y(x) = [gelu([sqrt(D) x, 1] W1), 1] W2                   (model: mlp, with 4 D hidden channels)
f(x) = y(x), or x + gamma * norm(y(x)) + delta           (with the norm of TTT, a layer norm)

gelu is the tanh approximation. A token's step is eta_t times the gradient of |f(u_t) - v_t|^2 / 2, taken at the weights
from the start of its mini-batch. Here, eta_t is divided by the size of a mini-batch, and by 2, the squared length of
[x, 1]. For the mlp, 4 D, the number of hidden channels, replaces the 2. So the steps of nearly equal keys do not
overshoot.

Without a norm, W and W2 start at 0, so that the memory is empty but can learn. With a norm, they start at random,
because a norm scales any y to the same size. W1 always starts at random.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, V value size, X inputs of a layer, including
the bias, Y its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from gated_kernels.inner_model.chunk import chunk_inner_model
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.delta.base import DeltaSpec
from liger_convert.mixers.read_pieces import START_SIZE

EXPANSION = 4
MOST_TOKENS = 1024  # in a mini-batch


@dataclass(frozen=True)
class InnerModelSpec(DeltaSpec):
    """Options of the inner model. A value other than the default changes the memory that a conversion starts with.

    model: what is trained on the tokens: a `linear` model, or an `mlp` with one hidden layer of 4 times the head size.
    mini_batch: how many tokens in a row take their gradients at the same weights. With 1, each token's gradient is
        taken at the weights after the previous token. TTT's paper uses 16.
    """

    model: Literal["linear", "mlp"] = "linear"
    mini_batch: int = 1

    @property
    def is_recurrent(self) -> bool:
        """Whether this is the plain delta rule: steps are linear in the weights and taken at every token."""
        return self.model == "linear" and self.mini_batch == 1

    @property
    def has_norm(self) -> bool:
        """Whether the model is x + norm(y(x)) instead of y(x)."""
        return False

    def step_scale(self, dims: HeadDims) -> float:
        """The factor that multiplies a token's learning rate."""
        return 1 / (self.mini_batch * (EXPANSION * dims.dim if self.model == "mlp" else 2))

    def problem(self) -> str | None:
        if not 1 <= self.mini_batch <= MOST_TOKENS:
            return f"mini_batch: {self.mini_batch} is not from 1 to {MOST_TOKENS}; use 1 for a step per token, or 16"
        return super().problem()


def layer_shapes(spec: InnerModelSpec, dims: HeadDims) -> list[tuple[int, int]]:
    """The inputs, including the bias, and outputs of each layer."""
    if spec.model == "linear":
        return [(dims.dim + 1, dims.dim)]
    hidden = EXPANSION * dims.dim
    return [(dims.dim + 1, hidden), (hidden + 1, dims.dim)]


def state_shape(spec: InnerModelSpec, dims: HeadDims, rows: int) -> tuple[int, ...]:
    """The state of one layer and sequence: what was added to the weights, in 2 rows, or 3 with momentum."""
    return dims.kv_heads, rows, sum(inputs * outputs for inputs, outputs in layer_shapes(spec, dims)) + 2


class InnerModel(nn.Module):
    """The weights that every document starts from, and the norm."""

    def __init__(self, spec: InnerModelSpec, dims: HeadDims):
        super().__init__()
        self.spec, self.dim = spec, dims.dim
        shapes = layer_shapes(spec, dims)
        self.first_GXY = nn.Parameter(torch.empty(dims.kv_heads, *shapes[0]))
        self.second_GXY = nn.Parameter(torch.empty(dims.kv_heads, *shapes[1])) if len(shapes) > 1 else None
        self.norm_G2V = nn.Parameter(torch.empty(dims.kv_heads, 2, dims.dim)) if spec.has_norm else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        normed = self.norm_G2V is not None
        if self.second_GXY is not None:
            _random(self.first_GXY, self.dim**-0.5)
            _random(self.second_GXY, self.second_GXY.shape[1] ** -0.5 if normed else 0.0)
        else:
            _random(self.first_GXY, 1.0 if normed else 0.0)
        if self.norm_G2V is not None:
            size_and_shift = torch.zeros_like(self.norm_G2V)
            size_and_shift[:, 0] = START_SIZE
            init.copy_(self.norm_G2V, size_and_shift)

    def forward(
        self,
        q_BTHD: Tensor,
        entries: tuple[Tensor, ...],
        initial_state: Tensor | None,
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the read of unit queries, [B,T,H,V] in float32, and the new state.

        entries: unit keys, values, learning rates, the log gates of decay and momentum if the mixer has them, and
        whether each token is written.
        """
        k_BTGD, v_BTGV, eta_BTG1, *log_gates, written_BTG1 = entries
        log_a, log_m = log_gates or (None, None)
        return chunk_inner_model(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            eta_BTG1,
            log_a,
            log_m,
            written_BTG1,
            first_GFW=self.first_GXY,
            second_GWV=self.second_GXY,
            norm_G2V=self.norm_G2V,
            scale=1.0 if self.second_GXY is None else self.dim**0.5,
            mini_batch=self.spec.mini_batch,
            initial_state=initial_state,
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )


def _random(layer_GXY: nn.Parameter, size: float) -> None:
    """Initializes with random weights of standard deviation `size` and biases of 0."""
    start_GXY = torch.zeros_like(layer_GXY)
    start_GXY[:, :-1].normal_(std=size)
    init.copy_(layer_GXY, start_GXY)  # one copy of the whole: init.copy_ skips parameters that were loaded
