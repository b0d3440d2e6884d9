"""`lockstep store`: what is in a store, whether it is sound, and tidying it."""
