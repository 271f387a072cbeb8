"""Delta-rule mixers: a new value replaces the old one under the same key."""
