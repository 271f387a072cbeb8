"""Sliding-window softmax attention with sinks. Also returns the log-sum-exp of its logits."""
