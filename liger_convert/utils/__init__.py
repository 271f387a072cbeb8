"""Errors, devices, progress, signals and processes: what every other part may use."""
