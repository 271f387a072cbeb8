"""The delta recurrence: S_t = D_t S_{t-1} - e_t^T (r_t D_t S_{t-1}) + k_t^T v_t with D_t = diag(a_t), read by
o_t = q_t S_t."""
