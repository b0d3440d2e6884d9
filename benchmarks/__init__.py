"""Benchmarks. Each run also measures a bound, such as bare system calls, and compares the two."""
