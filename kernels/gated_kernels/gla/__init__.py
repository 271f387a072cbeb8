"""Gated linear attention with a gate per feature: S_t = diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t."""
