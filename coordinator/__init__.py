"""The agreement of all ranks: ballots, rounds and verdicts."""
