"""The elementwise recurrence, S_t = A_t * S_{t-1} + k_t^T v_t, with a decay per entry of the state,
A_t = exp(dt_t log A)."""
