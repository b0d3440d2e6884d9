"""The contract suite of every transport, and ranks that are killed or stopped during a round."""
