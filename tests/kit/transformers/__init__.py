"""Transformers under test: tiny models, outputs with and without a cache, and groups of ranks."""
