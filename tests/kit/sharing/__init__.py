"""Compares how vLLM and SGLang describe the KV of a model, for stores that both engines share."""
