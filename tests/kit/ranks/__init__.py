"""Ranks under test: as threads, as processes, in turn, and what an executor is given."""
