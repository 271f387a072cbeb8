"""Files: how they are read, checked, written and named."""
