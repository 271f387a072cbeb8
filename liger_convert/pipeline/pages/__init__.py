"""Pages for a browser: the report of a run, and several runs side by side."""
