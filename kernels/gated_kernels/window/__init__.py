"""Sliding-window attention with sinks."""
