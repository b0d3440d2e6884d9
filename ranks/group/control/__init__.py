"""Operator requests to a running group: received by rank 0, executed by every rank.

A request becomes a command by a verdict (rule R14): rank 0 numbers the request, every rank reads it,
and all ranks execute it in the same step.
"""
