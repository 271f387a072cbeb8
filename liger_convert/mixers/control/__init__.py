"""Layers without a memory: the window alone, and softmax that forgets."""
