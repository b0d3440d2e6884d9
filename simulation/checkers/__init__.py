"""Checks that run after every simulated step and raise `Violated` if a rule is broken."""
