"""Mixers that route tokens between several memories of another mixer."""
