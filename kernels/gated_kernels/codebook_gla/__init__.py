"""Gated linear attention over a codebook's features of queries and keys, which are not kept for the backward pass."""
