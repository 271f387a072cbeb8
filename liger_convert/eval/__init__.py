"""Measures of a model: tasks, perplexity, copying, and what each branch of a layer carries."""
