"""Two groups of ranks in one virtual time: one computes prompts, and the other goes on with them."""
