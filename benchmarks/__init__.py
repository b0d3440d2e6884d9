"""Benchmarks, each measured next to its theoretical limit in the same run."""
