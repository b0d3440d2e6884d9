"""Lockstep: a KV cache for tensor-parallel inference that stays the same on every rank."""

__version__ = "0.1.0"
