"""Simulated engines of two kinds: the cache owns the device pages, or the engine owns them."""
