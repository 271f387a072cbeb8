"""Pages to be read in a browser: the report of a run, and several runs side by side."""
