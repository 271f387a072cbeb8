"""The codebook's map: a softmax over codes, of vectors that each head turns its own way and brings to length 1."""
