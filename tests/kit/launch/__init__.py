"""Replays and stores with content for tests of the command `lockstep`."""
