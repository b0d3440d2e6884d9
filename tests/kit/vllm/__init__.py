"""vLLM under test: groups of real engines, and its objects where it is not installed."""
