"""Mixers whose recurrent state has a diagonal decay: S = diag(a) S + k^T v."""
