"""Gated linear attention with one gate per key-value head: S_t = a_t S_{t-1} + k_t^T v_t, o_t = q_t S_t."""
