"""Damage to stored objects, done on purpose: what `fault+` does to each store."""
