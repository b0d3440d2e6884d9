"""One simulated rank: executor, copies and stores in virtual time."""
