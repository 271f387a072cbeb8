"""The recurrences and the window as ops, each with a plain reference and a fast implementation."""

from gated_kernels.diagonal.chunk import diagonal
from gated_kernels.window.chunk import window

OPS = {"diagonal": diagonal, "window": window}

__all__ = ["OPS", "diagonal", "window"]
