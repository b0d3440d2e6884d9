"""Everything that is drawn from a schedule's seed: settings, faults, models, prompts, requests."""
