"""The delta rule with momentum: Z_t = m_t Z_{t-1} + k_t^T (v_t - r_t M_{t-1}), M_t = a_t M_{t-1} + c_t Z_t,
o_t = q_t M_t."""
