"""Throughput from storage to host to device, compared with plain system calls on the same files."""
