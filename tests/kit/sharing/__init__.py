"""KV sharing between two engines: how each describes a model and identifies the other's KV."""
