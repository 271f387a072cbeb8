"""The names that a recipe and a model give to layers, besides the names of a recipe's own mixers."""

MAIN = "main"  # the mixer under `mixer:`
SOFTMAX = "softmax"  # a layer that keeps softmax attention
