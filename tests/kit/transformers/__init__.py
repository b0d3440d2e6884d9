"""Transformers under test: tiny models, their output with and without a cache, and groups of ranks."""
