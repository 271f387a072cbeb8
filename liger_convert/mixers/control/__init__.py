"""Mixers without a memory: only a window, and softmax attention that forgets."""
