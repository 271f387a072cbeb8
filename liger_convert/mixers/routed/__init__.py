"""Mixers made of several memories of another one."""
