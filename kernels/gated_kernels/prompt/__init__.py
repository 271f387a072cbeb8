"""What a layer computes of each token of a prompt beside its window and its memory, without gradients."""
