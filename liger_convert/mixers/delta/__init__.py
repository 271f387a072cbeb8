"""Mixers by the delta rule: a key's old value makes way for its new one."""
