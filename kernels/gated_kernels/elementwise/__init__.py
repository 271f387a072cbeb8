"""The elementwise recurrence, S_t = A_t * S_{t-1} + k_t^T v_t with a decay of every entry, A_t = exp(dt_t log A)."""
