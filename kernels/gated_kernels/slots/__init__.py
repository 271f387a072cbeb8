"""Softmax attention over a fixed number of slots, each a running weighted mean of keys and of values."""
