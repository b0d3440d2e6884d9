"""A workload on real processes, under torchrun or Ray, and the report of its run."""
