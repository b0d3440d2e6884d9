"""A real SGLang on a CPU, driven by tests: what it lacks there, its start, its answers, its counts."""
