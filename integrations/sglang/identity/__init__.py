"""What SGLang's KV is, apart from the tokens: weights, adapters, configuration (rule R16)."""
