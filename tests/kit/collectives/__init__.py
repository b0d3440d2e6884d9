"""The contract suite that every collective transport passes, and ranks that die during a round."""
