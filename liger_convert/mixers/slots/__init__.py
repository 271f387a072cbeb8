"""Mixers that attend to a fixed number of slots."""
