"""`lockstep top`: what a running group does, and why it hits no more than it does."""
