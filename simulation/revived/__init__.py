"""Bugs that serving engines have had, put back on purpose."""
