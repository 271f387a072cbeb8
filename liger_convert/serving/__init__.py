"""Serving a linearized model with vLLM. An engine imports this and the model, not the rest of the package."""
