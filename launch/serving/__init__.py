"""`lockstep serve-sim`: groups that prefill and groups that decode, with a router before them."""
