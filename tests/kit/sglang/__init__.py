"""SGLang under test: real engines on a CPU, and substitutes for its objects that need no SGLang."""
