"""The names that a recipe and a model give to layers, besides the names of a recipe's own mixers."""

MAIN = "main"  # the mixer under `mixer:`
LONG = "long"  # the mixer of `main` with a longer window, in the layers of `layers.long_windows`
SOFTMAX = "softmax"  # a layer that keeps softmax attention
