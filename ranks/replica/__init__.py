"""The replica: a deterministic state machine, equal on every rank."""
