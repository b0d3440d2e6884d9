"""The part of SGLang's page keys besides tokens: weights, adapters and configuration (rule R16)."""
