"""`lockstep plan` and `lockstep size`: how much memory to buy, and what it holds."""
