"""Whether this machine has what a group of ranks needs, and what to do where it has not."""
