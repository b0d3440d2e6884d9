"""Benchmarks, each of which also measures its theoretical limit in the same run."""
