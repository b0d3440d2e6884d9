"""What an operator asks of a running group: requests reach rank 0, and every rank carries them out.

A request becomes a command by a verdict, like everything that reaches one rank (rule R14): rank 0
numbers it, every rank reads it, and all carry it out in the same step.
"""
