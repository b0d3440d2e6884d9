"""The engine's side of one rank: caches and their opening, one-scheduler mode, control requests."""
