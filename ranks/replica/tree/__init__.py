"""The cached prefixes: the tree, its pools and pages, and eviction."""
