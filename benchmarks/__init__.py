"""Benchmarks. Each one measures a bound in the same run, and compares its result with the bound."""
