"""Stores for tests: the contract suite, test doubles for each backend, and injected failures."""
