"""One-scheduler mode: the scheduler's process has the replica, and workers execute orders and vote."""
