"""Two engines beside each other: what each makes of a model, and of the KV of the other."""
