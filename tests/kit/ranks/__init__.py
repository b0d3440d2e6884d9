"""Ranks under test, as threads, as processes, or one after the other in one thread."""
