"""One-scheduler mode: the replica in the scheduler's process, executor and ballot in each worker."""
