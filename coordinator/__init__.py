"""What all ranks agree on: ballots, rounds and verdicts."""
