"""Time and memory of a model compared with its base."""
