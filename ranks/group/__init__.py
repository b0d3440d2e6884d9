"""A group of ranks as an engine has it: the caches, how they open, and what an operator asks."""
