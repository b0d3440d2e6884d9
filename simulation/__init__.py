"""Deterministic simulation of a group of N ranks in virtual time with faults, replayable by seed."""
