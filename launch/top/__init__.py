"""`lockstep top`: the activity of a running group, and the causes of its cache misses."""
