"""Backends that wrap another one: `breaker+` (circuit breaker), `metrics+`, `fault+` (injection)."""
