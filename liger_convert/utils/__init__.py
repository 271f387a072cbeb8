"""Errors, devices, progress, signals and processes. Every other subpackage may import from here."""
