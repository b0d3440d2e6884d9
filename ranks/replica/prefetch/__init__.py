"""Prefetches: what storage is asked for, and how what has landed comes to the tree."""
