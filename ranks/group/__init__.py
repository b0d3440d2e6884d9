"""A group of ranks as an engine uses it: caches, opening, one-scheduler mode and operator requests."""
