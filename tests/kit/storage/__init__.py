"""Stores under test: the contract suite, test doubles of each backend, and injected failures."""
