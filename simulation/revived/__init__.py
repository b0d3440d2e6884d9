"""Bugs of the field, put back on purpose."""
