"""A small serving engine that drives a cache with known bytes: replay and demo run it."""
