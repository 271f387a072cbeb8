"""A codebook's map: a softmax over codes of vectors, which each head projects and brings to length 1."""
