"""Control requests of operators to a running group: rank 0 receives them, every rank executes them.

A control request becomes a command by a verdict (rule R14): rank 0 numbers it, every rank reads it, and
all ranks execute it in the same step.
"""
