"""The language of `tests/scenarios`, and what runs and prints it."""
