"""Agreement among the ranks of a group: ballots, rounds and verdicts."""
