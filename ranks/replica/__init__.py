"""The deterministic state machine that is equal on every rank."""
