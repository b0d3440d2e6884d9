"""Backends that stand before another one: `breaker+`, `metrics+`, `fault+`."""
