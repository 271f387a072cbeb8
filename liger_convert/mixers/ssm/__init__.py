"""State space mixers."""
