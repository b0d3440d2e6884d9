"""SGLang under test: real engines on a CPU, and its objects where it is not installed."""
