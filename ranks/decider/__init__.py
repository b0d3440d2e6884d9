"""One decider for many ranks: a replica in one process, executor and ballot in each other one."""
