"""Ranks under test: in threads, in processes, or in turn in one thread, and parts of executor tests."""
