"""What is drawn from a schedule's seed: settings, faults, models, prompts and requests."""
