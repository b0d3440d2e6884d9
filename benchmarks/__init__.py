"""Benchmarks. Each one measures, in the same run, a bound and compares its result with that bound."""
