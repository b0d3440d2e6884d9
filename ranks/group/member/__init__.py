"""One rank of a group: its steps and rounds, and what it tells of them."""
