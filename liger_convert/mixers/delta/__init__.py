"""Mixers by the delta rule: a key's new value replaces its old one."""
