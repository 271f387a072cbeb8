"""Files: reading, validating, writing and naming them."""
