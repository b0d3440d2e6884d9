"""Replay of a workload on real rank processes, under torchrun or Ray, and its report."""
