"""The diagonal recurrence over a codebook's maps of queries and keys, which are not kept for the backward pass."""
