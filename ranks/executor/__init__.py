"""Pools, copies and the storage loop of one rank."""
