"""Simulated engines: those that use pages of the cache, and those that lend pages of their own."""
