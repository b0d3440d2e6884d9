"""Stores under test: the contract as a suite, stores by name, and what can go wrong with them."""
