"""Code shared by the ops: tiles of Triton kernels, derivatives, tracing, and the registry of kernels."""
