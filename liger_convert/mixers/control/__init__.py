"""Mixers without a memory: a window alone, and softmax attention with a forget gate."""
