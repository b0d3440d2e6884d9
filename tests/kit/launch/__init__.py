"""Replays and stores as the command line meets them."""
