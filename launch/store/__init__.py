"""`lockstep store`: list, verify and clean up a store."""
