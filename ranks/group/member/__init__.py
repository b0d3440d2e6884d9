"""One rank of a group: its steps, rounds, statistics and log lines."""
