"""Delta-rule mixers: a key's new value replaces its old one."""
