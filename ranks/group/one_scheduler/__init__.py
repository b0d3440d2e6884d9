"""One-scheduler mode: replica in the scheduler's process, executor and ballot in each worker."""
