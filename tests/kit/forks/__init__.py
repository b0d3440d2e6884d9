"""Forks test processes from a parent that has imported an engine, because the import is slow."""
