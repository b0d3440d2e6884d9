"""Predicts the hit rate of a cache of a given size on a trace, with a real replica and no I/O."""
