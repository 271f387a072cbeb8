"""The linear layers of a decoding step, which has a few rows, without gradients."""
