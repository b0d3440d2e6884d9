"""One process that decides for many ranks: the replica there, executor and ballot in each worker."""
