"""What the ops share: tiles of Triton kernels, derivatives, tracing, and the registry of kernels."""
