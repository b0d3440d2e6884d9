"""Plug-ins that use Lockstep as the KV cache of vLLM, SGLang and Transformers."""
