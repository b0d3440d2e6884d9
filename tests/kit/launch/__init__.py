"""Replays and stores for tests of the command line."""
