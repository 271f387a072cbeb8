"""Layers without a memory: only a window, and softmax that forgets."""
