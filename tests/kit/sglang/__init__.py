"""SGLang under test: real engines on a CPU, and stand-ins for its objects without SGLang."""
