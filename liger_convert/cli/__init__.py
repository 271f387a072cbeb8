"""The `linearize` command."""
