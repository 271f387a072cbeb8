"""A memory that is a small model, linear or with a hidden layer, trained on every token by gradients that are taken
once a mini-batch: Z_t = m_t Z_{t-1} - eta_t grad(W'; k_t, v_t), W_t = a_t W_{t-1} + Z_t, o_t = f(q_t; W_t)."""
