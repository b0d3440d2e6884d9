"""The seed's draws: a schedule's world, faults, models, prompts and requests."""
