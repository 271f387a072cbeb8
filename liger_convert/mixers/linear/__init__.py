"""Mixers whose state decays by a diagonal: S = diag(a) S + k^T v."""
