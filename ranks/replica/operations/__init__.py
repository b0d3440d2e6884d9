"""What is in flight: the kinds of operations, how each begins and ends, and what comes of it."""
