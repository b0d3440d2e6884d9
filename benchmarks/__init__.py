"""Benchmarks; each one also measures in the same run the bound that its result is compared with."""
