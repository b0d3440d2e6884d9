"""`lockstep plan` and `lockstep size`: how much cache memory to buy, and how much it holds."""
