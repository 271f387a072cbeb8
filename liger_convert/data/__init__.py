"""Text: where it comes from, how it becomes documents and packed rows, and text that the base writes itself."""
