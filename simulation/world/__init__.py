"""What a seed draws: the world of a schedule, its faults, models, prompts and requests."""
