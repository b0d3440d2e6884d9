"""The language of `tests/scenarios`, with its runner and printer."""
