"""What vLLM and its watchers are told: KV events, statistics, metrics, and the line at the start."""
