"""Backends that stand before another one: `retry+`, `breaker+`, `limit+`, `metrics+`, `fault+`."""
