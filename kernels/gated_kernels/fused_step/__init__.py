"""One decoding step of a whole linearized layer, from the token's projections to the output projection's input."""
