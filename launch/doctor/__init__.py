"""`lockstep doctor`: check whether this machine can run a group of ranks, and suggest remedies."""
