"""Codebook feature map: each head projects its vectors, normalizes them to length 1 and takes a softmax over codes."""
