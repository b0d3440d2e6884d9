"""How control messages reach every rank of a group, outside of any collective."""
