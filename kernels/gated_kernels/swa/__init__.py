"""Sliding-window softmax attention with sinks, and the log of the normalizer that it saw."""
