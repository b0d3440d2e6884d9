"""Identity of SGLang's KV apart from the tokens: weights, adapters, configuration (rule R16)."""
