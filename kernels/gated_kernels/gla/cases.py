"""Test inputs for gated linear attention with a gate per feature."""

from __future__ import annotations

import torch

from gated_kernels.simple_gla.cases import Case, inputs
from gated_kernels.splits import in_pieces, one_by_one

__all__ = ["CASES", "Case", "in_pieces", "inputs", "one_by_one"]

CASES = {
    "one token": Case(1),
    "one token, exclusive": Case(1, exclusive=True),
    "two tokens, no state": Case(2, state=False),
    "three tokens, float64": Case(3, dtype=torch.float64),
    "a token less than a chunk": Case(31, R=1, F=5, V=5),
    "a chunk": Case(32, G=1, R=4, F=64, V=65),
    "a token more than a chunk": Case(33, F=80, V=16),
    "odd length, float64": Case(97, gate="mixed", dtype=torch.float64),
    "long": Case(300, F=64, V=65),
    "long, bf16": Case(200, F=64, V=65, dtype=torch.bfloat16),
    "bf16 values": Case(97, F=64, V=65, v_dtype=torch.bfloat16),
    "strong": Case(130, gate="strong", F=64, V=64),
    "strong, exclusive": Case(130, gate="strong", F=64, V=64, exclusive=True),
    "steady -0.7": Case(130, gate="-0.7"),
    "steady -1.4": Case(130, gate="-1.4"),
    "steady -5": Case(130, gate="-5"),
    "steady -20": Case(130, gate="-20"),
    "-200 and 0": Case(97, gate="mixed"),
    "-200 and 0, bf16": Case(97, gate="mixed", dtype=torch.bfloat16),
    "mild, but for some tokens": Case(200, gate="patches"),
    "mild, but for some tokens, bf16": Case(200, gate="patches", F=64, V=65, dtype=torch.bfloat16),
    "segments": Case(130, segments=True),
    "segments, -200 and 0": Case(130, gate="mixed", segments=True),
    "segments, exclusive, float64": Case(97, gate="strong", segments=True, exclusive=True, dtype=torch.float64),
    "normalizer, one token": Case(1, normalizer=True),
    "normalizer, a gate per feature": Case(97, gate="mixed", normalizer=True),
    "normalizer, a gate per feature, bf16": Case(97, F=64, V=64, normalizer=True, dtype=torch.bfloat16),
    "heads of 128, bf16": Case(200, G=1, R=4, F=128, V=128, dtype=torch.bfloat16),
    "softmax, one token": Case(1, q_lse=True),
    "softmax, exclusive": Case(33, F=40, exclusive=True, q_lse=True),
    "softmax, segments, exclusive, float64": Case(
        97, gate="strong", segments=True, exclusive=True, q_lse=True, dtype=torch.float64
    ),
    "softmax, bf16 values": Case(97, F=64, V=65, q_lse=True, v_dtype=torch.bfloat16),
    "softmax, heads of 64, bf16": Case(
        200, F=64, V=64, gate="patches", segments=True, q_lse=True, dtype=torch.bfloat16
    ),
    "softmax, heads of 80, bf16": Case(
        130, F=80, V=80, normalizer=True, exclusive=True, q_lse=True, dtype=torch.bfloat16
    ),
    "softmax, heads of 128, bf16": Case(200, G=1, R=4, F=128, V=128, q_lse=True, dtype=torch.bfloat16),
}
