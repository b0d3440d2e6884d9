"""Transformers under test: tiny models, what they say with and without a cache, and groups of ranks."""
