"""SGLang under test: its objects where it is not installed, and where it is."""
