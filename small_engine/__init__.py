"""A small serving engine that drives a cache with known bytes; used by replay and demo."""
