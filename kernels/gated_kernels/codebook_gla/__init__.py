"""Gated linear attention over a codebook's features of queries and keys, without saving these for the backward pass."""
