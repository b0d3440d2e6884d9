"""vLLM under test: groups of real engines, and substitutes for its objects that need no vLLM."""
