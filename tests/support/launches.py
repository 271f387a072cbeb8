"""The variants of Triton kernels that calls would launch: recorded instead of run, so that no GPU is needed."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from gated_kernels.common.interpreter import INTERPRETED
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

Variant = tuple[str, tuple[str, ...], tuple[Any, ...]]  # a kernel, what it is specialized on, launch options


class Pointer:
    """What Triton specializes on of a tensor. One on the meta device has an offset instead of an address."""

    def __init__(self, tensor: Tensor):
        self.dtype, self._address = tensor.dtype, tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return 0


@functools.cache
def specializer(kernel: Any) -> Any:
    """Triton's own function that tells what a launch of `kernel` on sm_90 is specialized on."""
    jitted = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(jitted.signature, jitted.params, CUDABackend(GPUTarget("cuda", 90, 32)))


@contextmanager
def recorded() -> Iterator[set[Variant]]:
    """The variants that are launched meanwhile. Tensors on the meta device count as on a GPU."""
    found: set[Variant] = set()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
        _, specialized, rest = specializer(self)(*pointers, **options)
        found.add((f"{self.fn.__module__}.{self.fn.__name__}", tuple(map(str, specialized)), (*sorted(rest.items()),)))

    def call(self: Any, *args: Any) -> Any:
        return self._init_fn(*args)  # on the meta device the op would make up its results

    def is_bf16(x: Tensor) -> bool:
        return x.dtype == torch.bfloat16

    with ExitStack() as stack:
        for kind in (InterpretedFunction, JITFunction):
            stack.enter_context(mock.patch.object(kind, "run", launch))
        stack.enter_context(mock.patch.object(CustomOpDef, "__call__", call))
        stack.enter_context(mock.patch.object(INTERPRETED, "value", True))
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        stack.enter_context(mock.patch.object(torch, "autocast", return_value=nullcontext()))
        for name, module in list(sys.modules.items()):
            if name.startswith("liger_convert.mixers.") and hasattr(module, "multiplies_in_bf16"):
                stack.enter_context(mock.patch.object(module, "multiplies_in_bf16", is_bf16))
        yield found
