"""Simulated engines: with device pages owned by the cache, and with engine-owned device pages."""
