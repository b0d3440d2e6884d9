"""One rank of a cache: its replica and its executor."""
