"""KV sharing between vLLM and SGLang: each engine's description of a model, compared."""
