"""Evaluation of a model: tasks, perplexity, copying, agreement with the base, and ablation of each branch of a
layer."""
