"""One simulated rank: an executor, copies and stores in virtual time."""
