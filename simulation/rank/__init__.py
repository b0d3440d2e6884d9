"""One simulated rank: its executor, copies and stores in virtual time."""
