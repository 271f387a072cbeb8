"""A memory that is a small model, linear or with one hidden layer, trained on every token. All gradients of a
mini-batch are taken at the same weights W': Z_t = m_t Z_{t-1} - eta_t grad(W'; k_t, v_t), W_t = a_t W_{t-1} + Z_t,
o_t = f(q_t; W_t)."""
