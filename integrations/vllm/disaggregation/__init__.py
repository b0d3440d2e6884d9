"""One engine computes a prompt and another goes on with it, as vLLM's routers have it."""
