"""Mixers whose state decays by a diagonal matrix: S = diag(a) S + k^T v."""
