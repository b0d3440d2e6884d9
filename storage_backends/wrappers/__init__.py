"""Backends that wrap another one: `breaker+`, `metrics+`, `fault+`."""
