"""vLLM under test: groups of real engines, and stand-ins for its objects without vLLM."""
