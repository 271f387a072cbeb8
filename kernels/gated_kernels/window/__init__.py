"""Sliding-window softmax attention with sinks, and the log of the mass that it saw."""
