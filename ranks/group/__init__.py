"""The engine's side of one rank: caches, how they open, one-scheduler mode, control requests."""
