"""Measurements, each beside its anchor in the same run."""
