"""Processes that are forked from one that has imported an engine, which takes longest of a start."""
