"""Forks processes from one that has imported an engine, because the import takes most of a start."""
