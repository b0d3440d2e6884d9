"""Metrics, traces and timelines of a running cache."""
