"""Deterministic simulation of N replicas in virtual time with faults; a seed replays a run exactly."""
