"""Softmax attention over a fixed number of slots. Each slot is a running weighted mean of keys and of values."""
