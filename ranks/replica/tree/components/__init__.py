"""Components: the kinds of state that a model keeps for a prefix, one class each."""
